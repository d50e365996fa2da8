// Agenda on MongoDB. Finished jobs are kept, as Agenda does by default.

import { Agenda } from "agenda";
import { MongoBackend, MongoChangeStreamNotificationChannel } from "@agendajs/mongo-backend";
import { MongoClient } from "mongodb";
import { inParallel, serve } from "./harness.mjs";

await serve({
  async open({ url, concurrency = 1, lockLimit = 0, processEvery = 5000, changeStream = false }) {
    const client = await MongoClient.connect(url);
    const db = client.db();
    const agenda = new Agenda({
      backend: new MongoBackend({ mongo: db }),
      ...(changeStream && { notificationChannel: new MongoChangeStreamNotificationChannel({ db }) }),
      processEvery,
      maxConcurrency: concurrency,
      defaultConcurrency: concurrency,
      defaultLockLimit: lockLimit,
    });
    agenda.on("error", (error) => console.error(error));
    await agenda.ready;
    return agenda;
  },

  async fill(agenda, { jobs }) {
    await inParallel(jobs, 100, (n) => agenda.now("noop", { n }));
  },

  async push(agenda, n) {
    await agenda.now("noop", { n });
  },

  async work(agenda, _config, on) {
    agenda.define("noop", async (job) => on.entered(job.attrs.data.n));
    agenda.on("complete:noop", (job) => on.completed(job.attrs.data.n)); // after its write of the outcome
    await agenda.start();
  },
});
