// graphile-worker on PostgreSQL. A completed job is deleted; there is no other way.

import { EventEmitter } from "node:events";
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import { handle, inBatches, payload, serve } from "./harness.mjs";

const logger = new Logger(() => (level, message) => {
  if (level === "error") console.error(message);
});

await serve({
  async open({ url }) {
    const utils = await makeWorkerUtils({ connectionString: url, logger });
    await utils.migrate();
    return { utils, url };
  },

  async fill({ utils }, config) {
    const job = (n) => ({ identifier: "noop", payload: payload(n, config) });
    await inBatches(config.jobs, 1000, (numbers) => utils.addJobs(numbers.map(job)));
  },

  async push({ utils }, n) {
    await utils.addJob("noop", { n });
  },

  async work({ url }, { concurrency, batch, pollInterval }, on) {
    const events = new EventEmitter();
    events.setMaxListeners(0);
    events.on("job:complete", ({ job }) => on.completed(job.payload.n));
    await run({
      logger,
      events,
      noHandleSignals: true,
      taskList: { noop: (data) => handle(data, on) },
      preset: {
        worker: {
          connectionString: url,
          concurrentJobs: concurrency,
          maxPoolSize: Math.min(concurrency + 2, 20),
          pollInterval,
          ...(batch > 0 && { localQueue: { size: batch }, completeJobBatchDelay: 0, failJobBatchDelay: 0 }),
        },
      },
    });
  },

  // The event comes before the row is deleted, so the last job is completed when the table is empty.
  async settled({ utils }) {
    const left = "select exists (select from graphile_worker._private_jobs) as any";
    while (await utils.withPgClient(async (client) => (await client.query(left)).rows[0].any)) {
      await new Promise((resolve) => setTimeout(resolve, 2));
    }
  },
});
