// Enqueues jobs of Recruiter, waits for them and runs them over HTTP: a client of `recruiter web`.
//
// A request whose connection breaks, or that the server cannot answer for a moment, is repeated: each job has an id, so it is enqueued once,
// and each end of a job is recorded once. Only `cancel` and `retry` are sent once.

import { randomBytes } from 'node:crypto';
import { setTimeout as pause } from 'node:timers/promises';

import core from './index.js';

export const { Failed, GiveUp, Job, Snooze } = core;
const { answerOf, decode, encode } = core.internals;

/** The longest wait of one request, in seconds. */
const LONGEST_WAIT = 50;
/** How long to wait for an answer beyond the time that the server may take for it. */
const ANSWER_WITHIN = 60;
/** The server is asked at least so often whether a job should stop. */
const ASK_EVERY = 5;
/** How long handlers that were told to stop have for it, and then the requests that roll their jobs back. */
const STOP_WITHIN = 5;
/** How many jobs are enqueued by one request, and about how many characters. */
const BATCH = 1000;
const BATCH_LENGTH = 4 * 1024 * 1024;

const now = () => performance.now() / 1000;
const duration = (seconds) => `${Math.round(seconds * 1000)}ms`;
const pathOf = (id) => `/jobs/${encodeURIComponent(id)}`;
/** Waits for a promise, but only for so many seconds. */
const waitFor = (promise, seconds) => Promise.race([promise, pause(seconds * 1000, undefined, { ref: false })]);
const newId = () => Math.floor(Date.now() / 1000).toString(16).padStart(8, '0') + randomBytes(8).toString('hex');

/** The server refuses a request. `status` is that of HTTP, undefined without an answer; `detail` says what is wrong. */
export class Problem extends Error {
  constructor(status, detail, retryAfter) {
    super(status === undefined ? detail : `${status}: ${detail}`);
    this.name = this.constructor.name;
    this.status = status;
    this.detail = detail;
    this.retryAfter = retryAfter;
  }
}

/** No answer has come. */
export class Unreachable extends Problem {
  constructor(detail) {
    super(undefined, detail);
  }
}

/** A job that was waited for is not done. `why` is the finish reason. */
export class JobFailed extends Error {
  constructor({ id, why, failure }) {
    const said = [failure?.class, failure?.message].filter(Boolean).join(': ');
    super(`job ${id} has ended as ${why}${said && `: ${said}`}`);
    this.name = 'JobFailed';
    Object.assign(this, { id, why, errorClass: failure?.class, reason: failure?.message, trace: failure?.trace });
  }
}

/** A job that was waited for has not ended in time. */
export class TimedOut extends Error {
  name = 'TimedOut';
}

const passes = (problem) => problem instanceof Problem && [undefined, 502, 503, 504].includes(problem.status);

/** A client of the server at this URL. A request is repeated for `patience` seconds from its first failure on, until it is answered. */
export class Client {
  #base;
  #headers;
  #patience;
  #works = new Set();

  constructor(url, token, { patience = 10 } = {}) {
    const { protocol, username, search } = URL.canParse?.(url) === false ? {} : new URL(url);
    if (!['http:', 'https:'].includes(protocol) || username || search) {
      throw new TypeError('the URL of `recruiter web` is like http://127.0.0.1:7420, without a user and a query');
    }
    const trimmed = token?.trim();
    if (trimmed !== undefined && !/^[\x20-\x7e]+$/.test(trimmed)) throw new TypeError('the token is empty, or has characters that no token has');
    this.url = url.replace(/\/+$/, '');
    this.#base = `${this.url}/api/v1`;
    this.#headers = trimmed === undefined ? {} : { authorization: `Bearer ${trimmed}` };
    this.#patience = patience;
  }

  /** Enqueues a job, and returns its id; with a `unique` key that is taken, the id of the job that has it. */
  async enqueue(className, parameters, spec) {
    const [, { id }] = await this.call('POST', '/jobs', { id: newId(), class: className, parameters, ...spec });
    return id;
  }

  /** Enqueues any number of jobs, `{ class: 'mail', parameters: {…}, … }` each, and returns how many. */
  async enqueueMany(jobs) {
    let done = 0;
    let batch = [];
    let length = 0;
    const send = async () => {
      if (batch.length) await this.call('POST', '/jobs/lines', batch.join('\n'), { linesBefore: done });
      done += batch.length;
      [batch, length] = [[], 0];
    };
    for await (const job of jobs) {
      length += batch[batch.push(encode({ id: newId(), ...job })) - 1].length;
      if (batch.length >= BATCH || length >= BATCH_LENGTH) await send();
    }
    await send();
    return done;
  }

  /** Waits until a job has ended, and returns its result. Throws `JobFailed` if it is not done, and `TimedOut`. */
  async wait(id, timeout = Infinity) {
    const until = now() + timeout;
    for (;;) {
      const poll = Math.max(1, Math.min(until - now(), LONGEST_WAIT));
      const path = `${pathOf(id)}/end?timeout=${duration(poll)}`;
      const [status, end] = await this.call('GET', path, undefined, { within: poll + ANSWER_WITHIN });
      if (status !== 202) {
        if (end.why === 'done') return end.result;
        throw new JobFailed(end);
      }
      if (now() >= until) throw new TimedOut(`job ${id} has not ended within ${timeout} s`);
    }
  }

  /** A job with its history. */
  async job(id) {
    return (await this.call('GET', pathOf(id)))[1];
  }

  /** Cancels a job. This needs the role `operator`, and is sent once, as `retry`: after `Unreachable`, look at the job. */
  cancel(id) {
    return this.#change(`${pathOf(id)}/cancel`);
  }

  /** Enqueues an archived job again: `new_id` in the answer. After `Unreachable`, `retried_as` of `job(id)` has it, if it was done. */
  retry(id, changes = {}) {
    return this.#change(`${pathOf(id)}/retry`, changes);
  }

  /** Runs jobs of these classes, `slots` at a time, until `stop()`, SIGTERM or SIGINT. */
  async work(classes, handler, { groups = [], slots = 1, lease = 60, wait = 5, grace = 20 } = {}) {
    if (!(slots >= 1)) throw new RangeError('`slots` is at least 1');
    const wanted = { classes: [classes].flat(), groups, wait: duration(wait), lease: duration(lease) };
    const work = new Work(this, wanted, handler, { lease, wait, grace });
    const stop = () => work.stop();
    this.#works.add(work);
    ['SIGTERM', 'SIGINT'].forEach((name) => process.on(name, stop));
    try {
      await work.run(slots);
    } finally {
      this.#works.delete(work);
      ['SIGTERM', 'SIGINT'].forEach((name) => process.off(name, stop));
    }
  }

  /** Ends all `work` of this client, soon. */
  stop() {
    this.#works.forEach((work) => work.stop());
  }

  /** Sent once: if only the answer was lost, the same request would be refused, or retry the job twice. */
  async #change(path, body) {
    return (await this.send('POST', path, body))[1];
  }

  /** A request that is repeated while the server does not answer, until this time or as long as the client has patience. Not for applications. */
  async call(method, path, body, { until, ...options } = {}) {
    const isBounded = until !== undefined;
    for (;;) {
      // An answer that does not come leaves time for further requests.
      if (isBounded) options.within = Math.min(ANSWER_WITHIN, Math.max(1, (until - now()) / 3));
      try {
        return await this.send(method, path, body, options);
      } catch (problem) {
        until ??= now() + this.#patience;
        const seconds = problem.retryAfter ?? (problem instanceof Unreachable ? 0.25 : 1);
        if (!passes(problem) || now() + seconds > until) throw problem;
        await pause(seconds * 1000);
      }
    }
  }

  /** One request: the status and the value of its answer. Of lines, the last one counts. Not for applications. */
  async send(method, path, body, { within = ANSWER_WITHIN, linesBefore } = {}) {
    const headers = { ...this.#headers };
    if (body !== undefined) headers['content-type'] = linesBefore === undefined ? 'application/json' : 'application/x-ndjson';
    const text = linesBefore === undefined && body !== undefined ? encode(body) : body;
    let response;
    let said;
    try {
      const signal = AbortSignal.timeout(Math.ceil(within * 1000));
      response = await fetch(this.#base + path, { method, headers, body: text, redirect: 'manual', signal });
      said = await response.text();
    } catch (error) {
      throw new Unreachable(`${this.url} does not answer: ${error.cause?.message || error.cause?.code || error.message}`);
    }
    const { status } = response;
    let value;
    try {
      value = decode(said.trim().split('\n').at(-1));
    } catch {
      throw new Problem(status, `${this.url} answers no JSON; is it \`recruiter web\`? It begins with ${JSON.stringify(said.slice(0, 80))}`);
    }
    if (status >= 300) throw new Problem(status, String(value?.detail ?? said), Number(response.headers.get('retry-after')) || undefined);
    if (linesBefore !== undefined && value.error) {
      throw new Problem(value.error.status, `job ${linesBefore + value.error.line}: ${value.error.detail}`);
    }
    return [status, value];
  }
}

/** Jobs that are being run. */
class Work {
  #client;
  #wanted;
  #handler;
  #options;
  #isStopping = false;
  #isAway = false;
  #error;
  #running = new Set();
  #timers = [];
  #over;
  #isOver = new Promise((resolve) => (this.#over = resolve));

  constructor(client, wanted, handler, options) {
    this.#client = client;
    this.#wanted = wanted;
    this.#handler = handler;
    this.#options = options;
  }

  async run(slots) {
    await Promise.race([Promise.all(Array.from({ length: slots }, () => this.#slot())), this.#isOver]);
    this.#timers.forEach(clearTimeout);
    if (this.#error) throw this.#error;
  }

  stop() {
    if (this.#isStopping) return;
    this.#isStopping = true;
    const late = { class: 'worker-stopping', message: 'the client stops, and the handler has not ended in time' };
    const tell = () => this.#running.forEach((reservation) => reservation.tell('worker-stopping'));
    // Each gives up a second earlier than all of them, so that its warning is logged.
    const rollBack = async () => {
      const ends = [...this.#running].map((reservation) => reservation.end('rollback', late, STOP_WITHIN - 1));
      await waitFor(Promise.all(ends), STOP_WITHIN);
      this.#over();
    };
    this.#timers = [setTimeout(tell, this.#options.grace * 1000), setTimeout(rollBack, (this.#options.grace + STOP_WITHIN) * 1000)];
  }

  async #slot() {
    try {
      while (!this.#isStopping) for (const reserved of await this.#reserve()) await this.#execute(reserved);
    } catch (error) {
      this.#error ??= error;
      this.stop();
    }
  }

  async #reserve() {
    try {
      const [, { jobs }] = await this.#client.send('POST', '/work/reserve', this.#wanted, { within: this.#options.wait + ANSWER_WITHIN });
      this.#isAway = false;
      return jobs;
    } catch (problem) {
      if (!passes(problem) && problem.status !== 429) throw problem;
      if (!this.#isAway) console.error(`recruiter-jobs: no jobs: ${problem.message}; trying again`);
      this.#isAway = true;
      await pause((problem.retryAfter ?? 1) * 1000);
      return [];
    }
  }

  async #execute(reserved) {
    const reservation = new Reservation(this.#client, reserved, this.#options.lease);
    // It has not begun: no attempt is counted.
    if (this.#isStopping) return reservation.end('rollback', { class: 'worker-stopping', message: 'the client stops', snooze: '0s' });
    this.#running.add(reservation);
    const [field, value] = await answerOf(this.#handler, reserved.parameters, reservation.job);
    await reservation.end(...endOf(field, JSON.parse(value)));
    this.#running.delete(reservation);
  }
}

/** A job of this client until its end. */
class Reservation {
  #client;
  #path;
  #lease;
  #until;
  #notes = new Map();
  #isLost = false;
  #hasEnded = false;
  #ended;
  #isOver = false;
  #wake = () => {};
  #kept;

  constructor(client, reserved, lease) {
    this.#client = client;
    this.#path = `/work/${reserved.reservation}/`;
    this.#lease = lease;
    // From the answer, which the server has sent at once: the request may have waited for the job.
    this.#until = now() + lease;
    const line = { ...reserved, id: 0, job: reserved.id, item: reserved.item?.index, items: reserved.item?.of };
    this.job = new Job(line, (field, value) => this.#note(field, JSON.parse(value)));
    this.#kept = this.#keep();
  }

  /** The handler should stop. */
  tell(why) {
    if (!this.job.cancelled) this.job.stop(why);
  }

  /** Commits the job, or rolls it back, once: until its lease is over, or within so many seconds, half of them for its notes. */
  async end(what, body, within) {
    const began = now();
    if (this.#hasEnded) {
      await (within === undefined ? this.#ended : waitFor(this.#ended, within));
      if (!this.#isOver) this.#drop('no answer has come in time');
      return;
    }
    this.#hasEnded = true;
    this.#wake();
    this.#ended = (async () => {
      await (within === undefined ? this.#kept : waitFor(this.#kept, within / 2));
      await this.#sendEnd(what, body, within === undefined ? this.#until : began + within);
      this.#isOver = true;
    })();
    await this.#ended;
  }

  async #sendEnd(what, body, until) {
    if (this.#isLost) return this.#drop('its lease is over');
    try {
      await this.#client.call('POST', this.#path + what, body, { until });
    } catch (problem) {
      if (problem.status === 410 || passes(problem)) return this.#drop(problem.message);
      // The work is done: another attempt would do it again.
      const refused = { class: what === 'commit' ? 'result' : 'error', message: `the ${what} is refused: ${problem.message}` };
      await this.#client.call('POST', `${this.#path}rollback`, { ...refused, give_up: what === 'commit' }, { until }).catch(() => {});
    }
  }

  #drop(why) {
    console.error(`recruiter-jobs: job ${this.job.id} is no longer this client's, and its end is dropped: ${why}`);
  }

  /** Of what is not sent yet, the last progress and checkpoint count, and all lines of the log. */
  #note(field, said) {
    if (field === 'extend_ms') return this.#note('log', 'ignored `extend`: over HTTP, the time limit is that of the job');
    const before = field === 'log' && this.#notes.has('log') ? `${this.#notes.get('log').log}\n` : '';
    this.#notes.set(field, field === 'progress' ? said : { [field]: field === 'log' ? before + said : said });
    this.#wake();
  }

  /** Extends the lease and sends notes, until the end. */
  async #keep() {
    const every = Math.min(this.#lease / 3, ASK_EVERY);
    let due = now() + every;
    while (!this.#isLost) {
      if (!this.#notes.size && !this.#hasEnded) await this.#changed(due - now());
      const [notes, hasEnded] = [[...this.#notes], this.#hasEnded];
      this.#notes.clear();
      for (const [field, body] of notes) await this.#say('notes', body, field);
      if (hasEnded && !this.#notes.size) return;
      if (now() >= due) {
        await this.#say('extend', { lease: duration(this.#lease) }, 'lease');
        due = now() + every;
      }
    }
  }

  #changed(seconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, Math.max(0, seconds * 1000));
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async #say(what, body, field) {
    // The server counts the lease from when it reads the request, which is later.
    const asked = now();
    try {
      const [, { stop }] = await this.#client.call('POST', this.#path + what, body, { until: this.#until });
      if (what === 'extend') this.#until = asked + this.#lease;
      if (stop) this.tell(stop);
    } catch (problem) {
      if (problem.status === 410 || passes(problem)) {
        this.#isLost = true;
        return this.tell('lost');
      }
      console.error(`recruiter-jobs: \`${field}\` of job ${this.job.id} is refused: ${problem.message}`);
      if (['progress', 'checkpoint'].includes(field)) this.#note('log', `ignored \`${field}\`: ${problem.detail}`);
    }
  }
}

/** The request that ends a job, from the answer of its handler. */
function endOf(field, said) {
  if (field === 'result') return ['commit', { result: said }];
  const { class: errorClass, message, trace, give_up, at_most, after_ms = 30_000, retry_after_ms } = said;
  const body = { class: errorClass, message, trace, give_up, at_most };
  if (field === 'snooze') body.snooze = `${after_ms}ms`;
  else if (retry_after_ms !== undefined) body.delay = `${retry_after_ms}ms`;
  return ['rollback', body];
}
