/** A value that can be stored: JSON, dates and integers of 64 bits. */
export type Json = null | boolean | number | string | bigint | Date | Json[] | { [key: string]: Json | undefined };

/** The job failed. Its retry policy decides whether there is another attempt. Any other error is a failure as well, with its name. */
export class Failed extends Error {
  constructor(message: string, options?: { errorClass?: string; retryAfter?: number });
  readonly errorClass?: string;
  readonly retryAfter?: number;
}

/** The job failed, and another attempt is pointless. */
export class GiveUp extends Failed {}

/** The work cannot be done yet. The job runs again after so many seconds, and this attempt does not count. */
export class Snooze extends Error {
  constructor(after?: number, message?: string, options?: { atMost?: number });
  readonly after?: number;
  readonly atMost?: number;
}

/** What a handler knows about its job, and what it reports about it. A report with a wrong value is ignored, with a line in the job's log. */
export class Job {
  private constructor();
  /** A job for unit tests of handlers, without a worker. */
  static forTests(job?: {
    className?: string;
    group?: string;
    attempt?: number;
    isLastAttempt?: boolean;
    lastCheckpoint?: Json;
    timeLimit?: number;
    item?: number;
    items?: number;
  }): Job & { readonly reported: Record<string, any>[] };
  readonly id: string;
  readonly className: string;
  readonly group: string;
  /** The number of this start, from 1. */
  readonly attempt: number;
  readonly isLastAttempt: boolean;
  /** The index of the item of a bundle, from 0, and the number of items. */
  readonly item?: number;
  readonly items?: number;
  /** The trace that the job belongs to, a W3C traceparent. */
  readonly traceparent?: string;
  /** The time limit in seconds, when the job began. */
  readonly timeLimit?: number;
  /** The checkpoint of the last attempt. */
  readonly lastCheckpoint?: any;
  /** Over HTTP: the results of the jobs that it has waited for. */
  readonly inputs: any[];
  /** Aborted when the job should stop. */
  readonly signal: AbortSignal;
  readonly cancelled: boolean;
  /** Reports how far the job is: `progress(40)` is a percentage, `progress(3, { of: 10 })` are counts. */
  progress(done: number, options?: { of?: number; text?: string }): void;
  /** Stores a cursor, which the next attempt has as `lastCheckpoint`. It is written within a second. */
  checkpoint(value: Json): void;
  /** Adds a line to the log of the job. */
  log(line: unknown): void;
  /** Extends the time limit of this execution. */
  extend(seconds: number): void;
  /** In a test: cancels the job. */
  stop(why?: string): void;
}

/** Registers a function that runs jobs of this class. */
export function job<Parameters = any>(
  className: string,
  handler: (parameters: Parameters, job: Job) => Json | void | Promise<Json | void>,
): void;

/** Runs jobs until the worker ends this program. */
export function run(): void;
