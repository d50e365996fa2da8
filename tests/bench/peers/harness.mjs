// What the Node.js peers have in common: how one process of a peer talks to `compare`.
//
// A process is started as `node PEER.mjs ROLE CONFIG`, where CONFIG is a JSON object, and has one of three roles:
//
//   fill    enqueues `config.jobs` jobs as fast as the system's own API can, says how long it took, and ends. The jobs
//           take `config.ms` milliseconds, none by default; one in a hundred takes `config.longMs`, if that is given.
//   work    runs jobs. It connects, says it is ready and waits for "go", so that no start-up time is measured.
//   drip    enqueues one job for each "next", and says when it called and when the system acknowledged it.
//
// It speaks one JSON object a line, on standard input and output, and ends when its standard input does: whatever
// becomes of `compare`, no peer is left behind. Instants are milliseconds of the machine's monotonic clock, which all
// processes of a machine share, so an instant of one process can be subtracted from one of another.

import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

export const now = () => Number(process.hrtime.bigint()) / 1e6;

const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");

/** What a job carries: its number, and how many milliseconds its handler takes if it does not do nothing. */
export function payload(n, { ms = 0, longMs = 0 }) {
  const takes = longMs > 0 && n % 100 === 99 ? longMs : ms;
  return takes > 0 ? { n, ms: takes } : { n };
}

/** The handler of a job with this payload: enters it, and takes as long as the payload says. */
export async function handle({ n, ms = 0 }, on) {
  on.entered(n);
  if (ms > 0) await sleep(ms);
}

/** Calls `each(0)` to `each(count - 1)`, at most `width` at a time. For APIs that enqueue one job a call. */
export async function inParallel(count, width, each) {
  let next = 0;
  const lane = async () => {
    while (next < count) await each(next++);
  };
  await Promise.all(Array.from({ length: Math.min(width, count) }, lane));
}

/** Calls `each` with consecutive slices of the numbers below `count`. For APIs that enqueue many jobs a call. */
export async function inBatches(count, size, each) {
  for (let first = 0; first < count; first += size) {
    await each(Array.from({ length: Math.min(size, count - first) }, (_, i) => first + i));
  }
}

/**
 * Runs the role that the command line names, with these functions of the peer:
 *
 *   open(config)              connects; its result is the first argument of all others
 *   fill(system, config)      enqueues jobs numbered 0 to config.jobs - 1; resolves when all are acknowledged
 *   push(system, number)      enqueues one job; resolves when it is acknowledged
 *   work(system, config, on)  starts consuming; calls on.entered(number) as a job's handler is entered and
 *                             on.completed(number) once the system says the job is completed
 *   settled(system, config)   optional, for systems that announce a completion before they have written it:
 *                             resolves when the last completion is written
 */
export async function serve(peer) {
  const [role, text] = process.argv.slice(2);
  const config = JSON.parse(text);
  const lines = createInterface({ input: process.stdin });
  lines.on("close", () => process.exit(0));
  const system = await peer.open(config);

  if (role === "fill") {
    const start = now();
    await peer.fill(system, config);
    say({ filled: config.jobs, seconds: (now() - start) / 1000 });
    process.exit(0);
  }
  if (role === "drip") {
    lines.on("line", async (line) => {
      const { next } = JSON.parse(line);
      const called = now();
      await peer.push(system, next);
      say({ acknowledged: next, called, at: now() });
    });
  }
  if (role === "work") {
    const progress = { completed: 0, first: null, last: null };
    const on = {
      entered(number) {
        progress.first ??= now();
        if (config.trace) say({ entered: number, at: now() });
      },
      completed() {
        progress.completed += 1;
        progress.last = now();
      },
    };
    lines.on("line", async (line) => {
      const message = JSON.parse(line);
      if (message.go) {
        say({ started: now() });
        await peer.work(system, config, on);
        let told = -1;
        setInterval(() => {
          if (progress.completed === told) return;
          told = progress.completed;
          say(progress);
        }, 20);
      }
      if (message.settle) {
        await peer.settled?.(system, config);
        say({ settled: peer.settled ? now() : null });
      }
    });
  }
  say({ ready: true });
}
