'use strict';

// Runs jobs of Recruiter in Node.js.
//
// A worker starts this program as a long-lived program (`mode = "long-lived"` in its workables file) and gives it one job after the other,
// as lines of JSON on standard input. The answers are lines of JSON on standard output.
//
// Require this module first. From then on, what the program prints goes to standard error, and its standard input is empty, also in the
// processes that it starts, because both belong to the protocol.
//
// Dates arrive as `Date`, and integers that a number cannot express as `BigInt`. A result and a checkpoint may have both.

const fs = require('node:fs');
const net = require('node:net');

/** The worker keeps less of each text. */
const LONGEST_TEXT = 16 * 1024;
/** More than the longest time. */
const LONGEST_MS = 1e18;

const handlers = new Map();
let isRunning = false;

/** The job failed. Its retry policy decides whether there is another attempt. */
class Failed extends Error {
  constructor(message, { errorClass, retryAfter } = {}) {
    super(textOf(message));
    refuseNaN(retryAfter);
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
    super(textOf(message));
    refuseNaN(after);
    this.name = 'Snooze';
    this.after = after;
    this.atMost = atMost;
  }
}

/** What a handler knows about its job, and what it reports about it. A report with a wrong value is ignored, with a line in the job's log. */
class Job {
  #say;
  #stop = new AbortController();

  constructor(line, say) {
    this.#say = say;
    this.number = line.id;
    this.id = line.job;
    this.className = line.class;
    this.group = line.group;
    this.attempt = line.attempt;
    this.isLastAttempt = line.is_last_attempt;
    this.item = line.item;
    this.items = line.items;
    this.traceparent = line.traceparent;
    this.timeLimit = line.time_limit_ms === undefined ? undefined : Number(line.time_limit_ms) / 1000;
    this.lastCheckpoint = line.checkpoint;
    this.inputs = line.inputs ?? [];
  }

  /** A job for unit tests of handlers, without a worker. `reported` has what the handler reports; `stop` cancels it. */
  static forTests({ className = 'test', group = 'generic', attempt = 1, isLastAttempt = false, lastCheckpoint, timeLimit, item, items } = {}) {
    const reported = [];
    const line = { id: 1, job: '0'.repeat(24), class: className, group, attempt, is_last_attempt: isLastAttempt };
    Object.assign(line, { item, items, checkpoint: lastCheckpoint, time_limit_ms: timeLimit === undefined ? undefined : timeLimit * 1000 });
    return Object.assign(new Job(line, (field, value) => reported.push({ [field]: decode(value) })), { reported });
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
    const progress = of === undefined ? { percent: numberOf(done) } : { done: numberOf(done), of: numberOf(of) };
    if (text !== undefined) progress.text = textOf(text);
    this.#say('progress', encode(progress));
  }

  /** Stores a cursor, which the next attempt has as `lastCheckpoint`. It is written within a second. */
  checkpoint(value) {
    let text;
    try {
      text = encode(value === undefined ? null : value);
    } catch (error) {
      return this.log(`ignored \`checkpoint\`: ${textOf(error)}`);
    }
    this.#say('checkpoint', text);
  }

  /** Adds a line to the log of the job. */
  log(line) {
    this.#say('log', encode(textOf(line)));
  }

  /** Extends the time limit of this execution. */
  extend(seconds) {
    refuseNaN(seconds);
    this.#say('extend_ms', encode(milliseconds(seconds)));
  }

  /** The worker has said that the job should stop. */
  stop(why = 'requested') {
    this.#stop.abort(new Error(why));
  }
}

function textOf(value) {
  try {
    return String(value).slice(0, LONGEST_TEXT);
  } catch {
    return `a value of type ${typeof value}`;
  }
}

/** A number, or else a text, which the worker ignores with a warning. */
function numberOf(value) {
  const number = ['number', 'bigint'].includes(typeof value) || (typeof value === 'string' && value.trim()) ? Number(value) : NaN;
  return Number.isFinite(number) ? number : textOf(value);
}

function refuseNaN(seconds) {
  if (Number.isNaN(seconds)) throw new RangeError('a time is a number of seconds, and not NaN');
}

function milliseconds(seconds) {
  if (seconds === Infinity) return LONGEST_MS;
  const number = numberOf(seconds);
  return typeof number === 'string' ? number : Math.max(0, Math.min(Math.round(number * 1000), LONGEST_MS));
}

/** The JSON of a value. Dates and BigInt are written as extended JSON. */
function encode(value) {
  const text = JSON.stringify(value, function (key, plain) {
    // Before its `toJSON` was called.
    const own = this[key];
    if (own instanceof Date) {
      if (Number.isNaN(own.getTime())) throw new TypeError('an invalid date is no JSON');
      return { $date: { $numberLong: String(own.getTime()) } };
    }
    if (typeof own === 'bigint') {
      if (BigInt.asIntN(64, own) !== own) throw new RangeError(`${own} has more than 64 bits: write it as a text`);
      return { $numberLong: String(own) };
    }
    if (typeof plain === 'number' && !Number.isFinite(plain)) throw new TypeError(`${plain} is no JSON`);
    // Its JSON would be an integer of more than 64 bits.
    if (typeof plain === 'number' && Math.abs(plain) >= 2 ** 63) return { $numberDouble: String(plain) };
    if (plain instanceof Map || plain instanceof Set) throw new TypeError('a Map or a Set is no JSON: make it an object or an array');
    return plain;
  });
  if (text === undefined) throw new TypeError(`a ${typeof value} is no JSON`);
  return text;
}

/** The value of a JSON text, with dates and BigInt of extended JSON. */
function decode(text) {
  return JSON.parse(exact(text), (_key, value) => {
    if (value === null || typeof value !== 'object' || Object.keys(value).length !== 1) return value;
    if (typeof value.$numberLong === 'string' && /^-?\d{1,19}$/.test(value.$numberLong)) {
      const number = Number(value.$numberLong);
      return Number.isSafeInteger(number) ? number : BigInt(value.$numberLong);
    }
    const date = ['string', 'number'].includes(typeof value.$date) ? new Date(value.$date) : undefined;
    return date === undefined || Number.isNaN(date.getTime()) ? value : date;
  });
}

/** The same JSON, whose integers beyond 2^53 are extended JSON, because `JSON.parse` would round them. */
function exact(text) {
  if (!/\d{16}/.test(text)) return text;
  const tag = (number) => (/^-?\d+$/.test(number) && !Number.isSafeInteger(Number(number)) ? `{"$numberLong":"${number}"}` : number);
  const parts = [];
  for (let from = 0, quote; from < text.length; from = quote) {
    quote = text.indexOf('"', from);
    if (quote < 0) quote = text.length;
    parts.push(text.slice(from, quote).replace(/-?\d[\d.eE+-]*/g, tag));
    const begin = quote++;
    while (quote < text.length && text[quote] !== '"') quote += text[quote] === '\\' ? 2 : 1;
    parts.push(text.slice(begin, ++quote));
  }
  return parts.join('');
}

/** Registers a function that runs jobs of this class. */
function job(className, handler) {
  if (typeof className !== 'string') throw new TypeError("job() needs the class of its jobs first: job('resize', async (parameters, job) => …)");
  if (typeof handler !== 'function') throw new TypeError(`the handler of class '${className}' is not a function`);
  if (/GeneratorFunction$/.test(handler.constructor?.name)) {
    throw new TypeError(`the handler of class '${className}' is a generator, which would not run: use an async function`);
  }
  if (handlers.has(className)) throw new Error(`class '${className}' is registered twice: remove one`);
  handlers.set(className, handler);
}

async function answer(line, current) {
  const handler = handlers.get(line.class);
  if (!handler) {
    const known = [...handlers.keys()].join(', ') || 'none';
    return ['error', encode({ class: 'unknown-class', message: `this program has no handler of class '${line.class}'; it has ${known}` })];
  }
  return answerOf(handler, line.parameters, current);
}

/** The answer of a handler: a field, and its value as JSON. */
async function answerOf(handler, parameters, current) {
  let result;
  try {
    result = await handler(parameters, current);
  } catch (error) {
    return error instanceof Snooze ? ['snooze', encode(snoozed(error))] : ['error', encode(failure(error))];
  }
  try {
    return ['result', encode(result === undefined ? null : result)];
  } catch (error) {
    // The work is done: another attempt would do it again.
    return ['error', encode({ class: 'result', message: `the result cannot be stored: ${textOf(error)}`, give_up: true })];
  }
}

function snoozed({ message, after, atMost }) {
  const said = { class: 'snoozed', message: textOf(message) };
  if (after !== undefined) said.after_ms = milliseconds(after);
  if (atMost !== undefined) said.at_most = numberOf(atMost);
  return said;
}

function failure(error) {
  // A property of an error may be anything, and may throw.
  const property = (name) => {
    try {
      return error?.[name];
    } catch {
      return undefined;
    }
  };
  const isError = error instanceof Error;
  const name = textOf((isError && property('name')) || 'error');
  const said = { class: textOf(property('errorClass') || name), message: textOf(isError ? property('message') : error) || name };
  if (property('stack')) said.trace = textOf(property('stack'));
  if (error instanceof GiveUp) said.give_up = true;
  else if (property('retryAfter') !== undefined) said.retry_after_ms = milliseconds(property('retryAfter'));
  return said;
}

/**
 * Takes both pipes of the protocol away from the handlers, the libraries and the processes that they start. Node.js cannot duplicate a
 * descriptor, so they are opened again.
 */
function redirect() {
  const again = (descriptor, flags) => fs.openSync(`/proc/self/fd/${descriptor}`, flags);
  const errors = fs.constants.O_WRONLY | fs.constants.O_APPEND;
  try {
    const pipes = { reads: again(0, 'r'), writes: again(1, fs.constants.O_WRONLY) };
    fs.closeSync(again(2, errors));
    // The lowest descriptor that is free is the next.
    fs.closeSync(0);
    fs.openSync('/dev/null', 'r');
    fs.closeSync(1);
    again(2, errors);
    return pipes;
  } catch (error) {
    throw new Error(`recruiter-jobs cannot move the pipes of its worker: ${error.message}. Run the program as the user of the worker, on Linux`);
  }
}

// Only in the process that the worker has started, and in none of its children.
let pipes;
if (process.env.RECRUITER_LONG_LIVED === '1') {
  delete process.env.RECRUITER_LONG_LIVED;
  pipes = redirect();
  process.on('exit', (code) => {
    if (!isRunning && code === 0) console.error('recruiter-jobs: the program ended before it called `run()`: call it last');
  });
}

function isByHand() {
  const className = process.env.RECRUITER_JOB_CLASS;
  if (className !== undefined) {
    return `recruiter-jobs: add \`mode = "long-lived"\` to [workables.${className}] in the workables file of the worker`;
  }
  return (
    'recruiter-jobs: this program runs jobs that a worker gives it. Name it in a workables file, with `mode = "long-lived"`, and start ' +
    '`recruiter-worker --config FILE`. To try a handler, call it with `Job.forTests()`'
  );
}

/** Runs jobs until the worker ends this program. */
function run() {
  if (!pipes) {
    console.error(isByHand());
    process.exit(1);
  }
  if (isRunning) throw new Error('run() was called twice');
  isRunning = true;
  const write = (number, field, value) => {
    const line = Buffer.from(`{"id":${number},"${field}":${value}}\n`);
    for (let at = 0; at < line.length; ) at += fs.writeSync(pipes.writes, line, at);
  };
  let current;
  let working;
  const take = (text) => {
    const line = decode(text);
    if (line.cancel !== undefined) {
      if (current?.number === line.cancel) current.stop(line.why);
      return;
    }
    current = new Job(line, (field, value) => write(line.id, field, value));
    working = answer(line, current).then(([field, value]) => write(line.id, field, value));
  };
  const input = new net.Socket({ fd: pipes.reads, readable: true, writable: false });
  let parts = [];
  input.on('data', (chunk) => {
    let from = 0;
    for (let at; (at = chunk.indexOf(10, from)) >= 0; from = at + 1) {
      parts.push(chunk.subarray(from, at));
      take(Buffer.concat(parts.splice(0)).toString());
    }
    parts.push(chunk.subarray(from));
  });
  // The worker has closed standard input. A handler that still runs ends first; timers and connections that it left open do not count.
  input.on('close', async () => {
    await working;
    process.exit(0);
  });
}

module.exports = { Failed, GiveUp, Job, Snooze, job, run };
// For `http.mjs`.
Object.defineProperty(module.exports, 'internals', { value: { answerOf, decode, encode } });
