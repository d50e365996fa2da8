import { Failed, GiveUp, Job, Json, Snooze } from './index.js';

export { Failed, GiveUp, Job, Json, Snooze };

/** The server refuses a request. */
export class Problem extends Error {
  /** The status of HTTP; undefined without an answer. */
  readonly status?: number;
  /** What is wrong, and what to do. */
  readonly detail: string;
  /** After how many seconds the request may be repeated, if the server says so. */
  readonly retryAfter?: number;
}

/** No answer has come. */
export class Unreachable extends Problem {}

/** A job that was waited for is not done. */
export class JobFailed extends Error {
  readonly id: string;
  /** The finish reason. */
  readonly why: string;
  readonly errorClass?: string;
  /** The message of its failure. */
  readonly reason?: string;
  readonly trace?: string;
}

/** A job that was waited for has not ended in time. */
export class TimedOut extends Error {}

/** The settings of a job, as in a line of `recruiter enqueue --from`: `{ after: '5m', group: 'mail', priority: 7 }`. */
export type Spec = { id?: string; [setting: string]: Json | undefined };

type Parameters = { [key: string]: Json | undefined };

export interface WorkOptions {
  /** Only jobs of these groups. */
  groups?: string[];
  /** How many jobs run at a time; 1 if it is not given. */
  slots?: number;
  /** Seconds until the job of a client that has vanished has failed; 60 if it is not given. */
  lease?: number;
  /** Seconds that one request waits for a job, and a stop with it; 5 if it is not given. */
  wait?: number;
  /** Seconds that handlers have after a stop until they are told; 5 s later their jobs are rolled back. 20 if it is not given. */
  grace?: number;
}

/** A client of the server at this URL. A request is repeated for `patience` seconds (10) from its first failure on, until it is answered. */
export class Client {
  constructor(url: string, token?: string, options?: { patience?: number });
  readonly url: string;
  /** Enqueues a job, and returns its id; with a `unique` key that is taken, the id of the job that has it. */
  enqueue(className: string, parameters?: Parameters, spec?: Spec): Promise<string>;
  /** Enqueues any number of jobs, and returns how many. When one is refused, `Problem` says which: those before it are enqueued. */
  enqueueMany(jobs: Iterable<Spec & { class: string }> | AsyncIterable<Spec & { class: string }>): Promise<number>;
  /** Waits until a job has ended, for so many seconds, and returns its result. Throws `JobFailed` if it is not done, and `TimedOut`. */
  wait<Result = any>(id: string, timeout?: number): Promise<Result>;
  /** A job with its history. */
  job(id: string): Promise<Record<string, any>>;
  /** Cancels a job. This needs the role `operator`, and is sent once, as `retry`: after `Unreachable`, look at the job. */
  cancel(id: string): Promise<Record<string, any>>;
  /** Enqueues an archived job again: `new_id` in the answer. After `Unreachable`, `retried_as` of `job(id)` has it, if it was done. */
  retry(id: string, changes?: Parameters): Promise<Record<string, any>>;
  /** Runs jobs of these classes until `stop()`, SIGTERM or SIGINT. The handler is as for a long-lived program. */
  work<P = any>(
    classes: string | string[],
    handler: (parameters: P, job: Job) => Json | void | Promise<Json | void>,
    options?: WorkOptions,
  ): Promise<void>;
  /** Ends all `work` of this client, soon. */
  stop(): void;
}
