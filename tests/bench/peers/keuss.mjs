// Keuss on MongoDB, with one of its backends: `mongo` (simple), `pl-mongo` (pipeline), `bucket-mongo-safe` (bucket).
//
// Jobs are reserved and then committed: a job of a killed consumer comes back, as with all other systems here. Keuss
// can also take a job out of the queue when it hands it over, which is faster and loses the job of a killed consumer.
// Statistics are kept in memory, which saves Keuss a write a step; consumers in other processes are woken through
// its signaller on a capped collection, its default.

import { createRequire } from "node:module";
import { promisify } from "node:util";
import { inParallel, serve } from "./harness.mjs";

const require = createRequire(import.meta.url);
const memoryStats = require("keuss/stats/mem");
const cappedSignaller = require("keuss/signal/mongo-capped");

/** Keuss gives each of its parts a database of its own, named after the first. */
const withSuffix = (url, suffix) => url.replace(/(?=\?|$)/, suffix);

/**
 * Lets a second process use the capped collection of the first.
 *
 * The signaller's library takes it over when the server says that it exists, which it knows by the words of old servers
 * only: with MongoDB 5 or newer every process but the first would end with an error. This does for new servers just
 * what the library does for old ones.
 */
function shareChannel(channel) {
  channel.on("error", (error) => {
    if (error.codeName !== "NamespaceExists") throw error;
    channel.collection = channel.connection.db.collection(channel.name);
    channel.emit("collection", channel.collection);
  });
}

await serve({
  async open({ url, backend, options }) {
    const factory = await promisify(require(`keuss/backends/${backend}`))({
      url,
      stats: { provider: memoryStats },
      // It tells others of an insertion once in so many milliseconds; the shortest is the best for latency.
      signaller: { provider: cappedSignaller, opts: { url: withSuffix(url, "_signal"), bufferTime: 1 } },
      pollInterval: 100, // only the safety net of the signaller; default 60 s
      ...options,
    });
    shareChannel(factory.signaller_factory()._channel);
    const queue = await promisify(factory.queue.bind(factory))("bench", options ?? {});
    const push = promisify((n, done) => queue.push({ n }, done));
    return { queue, push };
  },

  async fill({ queue, push }, { jobs }) {
    await inParallel(jobs, 200, push);
    await promisify(queue.drain.bind(queue))(); // the bucket backend acknowledges a job before it is written
  },

  async push({ push }, n) {
    await push(n);
  },

  async work({ queue }, { concurrency }, on) {
    const consume = (lane) => {
      queue.pop(`lane ${lane}`, { reserve: true }, (error, job) => {
        if (error) return console.error(error);
        on.entered(job.payload.n);
        queue.ok(job, (failure, committed) => {
          if (failure || !committed) console.error(failure ?? "Keuss lost the reservation of a job");
          else on.completed(job.payload.n);
          consume(lane);
        });
      });
    };
    for (let lane = 0; lane < concurrency; lane += 1) consume(lane);
  },

  // The bucket backend confirms a commit before it is written, so the last job is completed when none is left there.
  async settled({ queue }) {
    const left = promisify(queue.totalSize.bind(queue));
    while ((await left()) > 0) await new Promise((resolve) => setTimeout(resolve, 2));
  },
});
