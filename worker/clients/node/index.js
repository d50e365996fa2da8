'use strict';

// Runs jobs of Recruiter in Node.js.
//
// A worker starts this program as a long-lived program (`mode = "long-lived"` in its workables file) and gives it one job after the other,
// as lines of JSON on standard input. The answers are lines of JSON on standard output. What a handler prints with `console` or
// `process.stdout` goes to standard error, because standard output belongs to the protocol.

const { Console } = require('node:console');
const readline = require('node:readline');

const handlers = new Map();

/** The job failed. Its retry policy decides whether there is another attempt. */
class Failed extends Error {
  constructor(message, { errorClass, retryAfter } = {}) {
    super(message);
    this.name = this.constructor.name;
    this.errorClass = errorClass;
    this.retryAfter = retryAfter;
  }
}

/** The job failed, and another attempt is pointless. */
class GiveUp extends Failed {}

/** The work cannot be done yet. The job runs again after so many seconds, and this attempt does not count. */
class Snooze extends Error {
  constructor(after, message = 'too early', { atMost } = {}) {
    super(message);
    this.name = 'Snooze';
    this.after = after;
    this.atMost = atMost;
  }
}

/** What a handler knows about its job, and what it reports about it. */
class Job {
  #say;
  #stop = new AbortController();

  constructor(line, say) {
    this.#say = (message) => say({ id: line.id, ...message });
    this.number = line.id;
    this.id = line.job;
    this.className = line.class;
    this.group = line.group;
    this.attempt = line.attempt;
    this.isLastAttempt = line.is_last_attempt;
    this.item = line.item;
    this.items = line.items;
    this.traceparent = line.traceparent;
    this.timeLimit = line.time_limit_ms === undefined ? undefined : line.time_limit_ms / 1000;
    this.lastCheckpoint = line.checkpoint;
  }

  /** Aborted when the job should stop. */
  get signal() {
    return this.#stop.signal;
  }

  get cancelled() {
    return this.#stop.signal.aborted;
  }

  /** Reports how far the job is: `progress(40)` is a percentage, `progress(3, { of: 10 })` are counts. */
  progress(done, { of, text } = {}) {
    this.#say({ progress: of === undefined ? { percent: done, text } : { done, of, text } });
  }

  /** Stores a cursor, which the next attempt has as `lastCheckpoint`. It is written within a second. */
  checkpoint(value) {
    this.#say({ checkpoint: value === undefined ? null : value });
  }

  /** Adds a line to the log of the job. */
  log(line) {
    this.#say({ log: String(line) });
  }

  /** Extends the time limit of this execution. */
  extend(seconds) {
    this.#say({ extend_ms: Math.round(seconds * 1000) });
  }

  /** The worker has said that the job should stop. */
  stop(why) {
    this.#stop.abort(new Error(why));
  }
}

/** Registers a function that runs jobs of this class. */
function job(className, handler) {
  if (handlers.has(className)) throw new Error(`class '${className}' is registered twice: remove one`);
  handlers.set(className, handler);
}

async function answer(line, current) {
  const handler = handlers.get(line.class);
  if (!handler) {
    const known = [...handlers.keys()].join(', ') || 'none';
    return { error: { class: 'unknown-class', message: `this program has no handler of class '${line.class}'; it has ${known}` } };
  }
  try {
    const result = await handler(line.parameters, current);
    return JSON.parse(JSON.stringify({ result: result === undefined ? null : result }));
  } catch (error) {
    if (error instanceof Snooze) {
      const after = error.after === undefined ? undefined : Math.round(error.after * 1000);
      return { snooze: { class: 'snoozed', message: error.message, after_ms: after, at_most: error.atMost } };
    }
    const name = error instanceof Error ? error.name : 'error';
    return {
      error: {
        class: error?.errorClass || name,
        message: (error instanceof Error ? error.message : String(error)) || name,
        trace: error?.stack,
        give_up: error instanceof GiveUp,
        retry_after_ms: error?.retryAfter === undefined ? undefined : Math.round(error.retryAfter * 1000),
      },
    };
  }
}

/** Runs jobs until the worker ends this program. */
function run() {
  const write = process.stdout.write.bind(process.stdout);
  // What a handler prints must not mix with the answers.
  process.stdout.write = process.stderr.write.bind(process.stderr);
  globalThis.console = new Console(process.stderr, process.stderr);
  const say = (message) => write(`${JSON.stringify(message)}\n`);
  const work = async (line, own) => say({ id: line.id, ...(await answer(line, own)) });
  let current;
  let working;
  const lines = readline.createInterface({ input: process.stdin, crlfDelay: Infinity });
  lines.on('line', (text) => {
    const line = JSON.parse(text);
    if (line.cancel !== undefined) {
      if (current?.number === line.cancel) current.stop(line.why);
      return;
    }
    const own = new Job(line, say);
    current = own;
    working = work(line, own);
  });
  // The worker has closed standard input. A handler that still runs ends first; timers and connections that it left open do not count.
  lines.on('close', async () => {
    await working;
    process.exit(0);
  });
}

module.exports = { Failed, GiveUp, Job, Snooze, job, run };
