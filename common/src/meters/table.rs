//! The table of all metrics. `docs/metrics.md` has the same for people; a test compares them.

use super::{Kind, Meter};

macro_rules! meters {
    ($($constant:ident $kind:ident $name:literal [$($label:literal),*] $help:literal)*) => {
        $(
            #[doc = $help]
            pub const $constant: Meter = Meter { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help };
        )*

        /// All metrics.
        pub const ALL: &[Meter] = &[$($constant),*];
    };
}

meters! {
    BUILD_INFO Gauge "recruiter_build_info" ["program", "version"] "Always 1; the labels say which program of which version this is"
    READY Gauge "recruiter_ready" [] "1 if /readyz answers 200, else 0"
    MAIN_LOOP_AGE Gauge "recruiter_main_loop_age_seconds" [] "Seconds since the main loop made progress, at the time of the scrape"
    DATABASE_SECONDS Calls "recruiter_database_seconds" ["operation"] "Seconds of an operation of MongoDB, until its answer or its failure"
    DATABASE_ERRORS Counter "recruiter_database_errors_total" ["operation", "problem"] "Failed operations of MongoDB"
    EVENTS_DROPPED Counter "recruiter_events_dropped_total" [] "Events for subscribers that were dropped, because too many waited or MongoDB did not take them in time"

    JOBS_STARTED Counter "recruiter_jobs_started_total" ["class"] "Started jobs: their workable is called"
    JOBS_ENDED Counter "recruiter_jobs_ended_total" ["class", "outcome"] "Ends of started jobs"
    JOB_LATENCY Seconds "recruiter_job_latency_seconds" ["class"] "Seconds from the instant at which a job is due to the call of its workable"
    JOB_EXECUTION Seconds "recruiter_job_execution_seconds" ["class"] "Seconds of an execution"
    SLOTS Gauge "recruiter_slots" ["state"] "Slots of this worker, busy and free"
    COMMIT_SIZE Sizes "recruiter_commit_batch_size" [] "Ends of jobs, outcomes of items and notes that were written together"
    COMMIT_SECONDS Calls "recruiter_commit_seconds" [] "Seconds of such a write, with its repetitions at once"
    HEARTBEATS Counter "recruiter_heartbeats_total" ["outcome"] "Heartbeats of this worker"
    HEARTBEAT_AGE Seconds "recruiter_heartbeat_age_seconds" [] "Seconds since the heartbeat before, when a heartbeat is acknowledged"
    HEARTBEAT_AT Gauge "recruiter_heartbeat_timestamp_seconds" [] "Instant of the last acknowledged heartbeat by the clock of MongoDB, in seconds since 1970; 0 without a session"

    LEADER Gauge "recruiter_leader" [] "1 while this recruiter leads, else 0"
    LEASE_TERM Gauge "recruiter_lease_term" [] "Term of the lease while this recruiter leads, else 0"
    ROUNDS Counter "recruiter_rounds_total" ["outcome"] "Rounds of the leader"
    ROUND_SECONDS Calls "recruiter_round_seconds" [] "Seconds of a round that did not fail"
    JOBS_ASSIGNED Counter "recruiter_jobs_assigned_total" ["group"] "Jobs that were assigned to workers"
    ACCEPTED_JOBS Gauge "recruiter_accepted_jobs" [] "Jobs that all workers together accepted before the last round, in free slots and ahead"
    HINTS Counter "recruiter_hints_total" ["hint"] "Hints that the leader has received"
    JOBS_WAITING Gauge "recruiter_jobs_waiting" ["group", "reason"] "Jobs that wait, by the reason why, as last sampled by the leader"
    OLDEST_WAITING Gauge "recruiter_oldest_waiting_seconds" ["group"] "Seconds for which the oldest waiting job has been due, as last sampled by the leader"
    SAMPLE_SECONDS Calls "recruiter_sample_seconds" [] "Seconds in which the leader has sampled the waiting jobs and the permits"
    PERMITS_IN_USE Gauge "recruiter_permits_in_use" ["resource"] "Permits of a resource that jobs hold, as last sampled by the leader"
    PERMITS Gauge "recruiter_permits" ["resource"] "Permits that a resource has, as last sampled by the leader"
    SCHEDULE_LATENESS Seconds "recruiter_schedule_lateness_seconds" [] "Seconds from the instant at which the run of a schedule is due to the insert of its job"
    SCHEDULE_SLOTS Counter "recruiter_schedule_slots_total" ["outcome"] "Slots of schedules: run, missed, or skipped because an earlier run was not finished"

    WORKERS_RETIRED Counter "recruiter_workers_retired_total" ["cause"] "Workers that this cleaner has declared dead"
    JOBS_RESCUED Counter "recruiter_jobs_rescued_total" ["outcome"] "Jobs of dead workers that this cleaner has ended"
    RESCUES_FAILED Counter "recruiter_rescues_failed_total" [] "Rescues that failed and are tried again"
    JOBS_EXPIRED Counter "recruiter_jobs_expired_total" [] "Jobs that this cleaner has archived because they were not started in time"
    JOBS_PRUNED Counter "recruiter_jobs_pruned_total" [] "Archived jobs that this cleaner has deleted because their period of retention had passed"
    FILES_PRUNED Counter "recruiter_files_pruned_total" [] "Files without a job, and unfinished uploads, that this cleaner has deleted"
    DUTY_SECONDS Calls "recruiter_duty_seconds" ["duty"] "Seconds of one pass of a duty of the cleaner"
    DUTIES_FAILED Counter "recruiter_duties_failed_total" ["duty"] "Passes of a duty of the cleaner that failed"
}
