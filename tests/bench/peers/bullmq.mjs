// BullMQ on Redis. Completed jobs are kept, as BullMQ does by default.

import { Queue, Worker } from "bullmq";
import { handle, inBatches, payload, serve } from "./harness.mjs";

const QUEUE = "bench";

await serve({
  async open({ host, port }) {
    const connection = { host, port, maxRetriesPerRequest: null };
    const queue = new Queue(QUEUE, { connection });
    await queue.waitUntilReady();
    return { connection, queue };
  },

  async fill({ queue }, config) {
    const job = (n) => ({ name: "noop", data: payload(n, config) });
    await inBatches(config.jobs, 1000, (numbers) => queue.addBulk(numbers.map(job)));
  },

  async push({ queue }, n) {
    await queue.add("noop", { n });
  },

  async work({ connection }, { concurrency }, on) {
    const worker = new Worker(QUEUE, (job) => handle(job.data, on), { connection, concurrency });
    worker.on("completed", (job) => on.completed(job.data.n)); // after the script that moves the job has answered
    worker.on("error", (error) => console.error(error));
  },
});
