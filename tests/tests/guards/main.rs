//! The guards of the store: every condition of every filter, by the one case that it is there for.
//!
//! Each test puts the document that is meant next to documents that differ from it in one thing each, and then calls the
//! operation itself. `tests/guards.py` drops the conditions one by one and expects a test here to fail for each.
//!
//! | file | guards of |
//! |---|---|
//! | `due` | reads of due jobs, of lanes that have jobs, and of groups |
//! | `start` | reads and locks of jobs; the jobs that a start has locked |
//! | `notes` | outcomes of the items of a running bundle; notes of a running job |
//! | `files` | files of jobs |
//! | `finish` | the ends of attempts: archive, delete, reschedule, discard |
//! | `rescue` | jobs of dead workers, locks without a holder, jobs that have expired |
//! | `control` | cancel, hasten, change, retry and delete jobs; ask workers to stop |
//! | `retention` | the deletion of archived jobs |
//! | `schedules` | schedules of periodic jobs |
//! | `lease`, `roster` | the recruiter's lease; one document for each worker |
//! | `hints` | hints, and the connection to the leader |
//! | `views` | lists, walks and statistics for people; reads that save work |
//! | `unique` | jobs with a unique key |
//! | `limits` | full groups, gates, pauses of lines, slow rates |
//! | `consumers` | consumer groups, whose messages become jobs |
//! | `graphs` | jobs that wait for others |
//! | `events` | the ring of events |
//! | `setting` | no tests: the database of a test, and documents for it |

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

mod consumers;
mod control;
mod due;
mod events;
mod files;
mod finish;
mod graphs;
mod hints;
mod lease;
mod limits;
mod notes;
mod rescue;
mod retention;
mod roster;
mod schedules;
mod setting;
mod start;
mod unique;
mod views;
