//! Examines a whole installation: MongoDB, the schema, the processes, and the jobs that wait. It reads only, and each [`Finding`] says in a
//! sentence what is, and what to do.
//!
//! What this MongoDB user may not read is [`State::Unknown`], not an error: the role `read` on the database is enough for most.
//!
//! | file | what it examines |
//! |---|---|
//! | `server` | the members of the replica set, their clocks, versions and disks; the oplog; the roles of the user |
//! | `encryption` | whether the connection is encrypted |
//! | `stored` | the schema: version, validators, indexes, rings |
//! | `fleet` | the leader, the cleaners and the workers |
//! | `waiting` | due jobs that nothing runs, locked jobs without a worker, settings that are not valid |

mod encryption;
mod fleet;
mod server;
mod stored;
mod waiting;

use bson::Document;

use crate::{
    base::{chain, integer, words},
    mongo::{Store, StoreError},
};

words! {
    /// How it stands.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum State {
        /// As it should be.
        Good = "ok",
        /// This user may not read it, or it could not be read.
        Unknown = "unknown",
        /// Works, and may fail or cost much later.
        Warning = "warning",
        /// Jobs do not run, or could be lost.
        Error = "error",
    }

    /// The word, for programs.
    fn name;
}

words! {
    /// What was examined. The names are stable.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[non_exhaustive]
    pub enum Check {
        /// The members of the replica set.
        ReplicaSet = "replica-set",
        /// The release of MongoDB.
        Version = "version",
        /// The clocks of the members.
        Clocks = "clocks",
        /// The file system of the primary.
        Disk = "disk",
        /// The time that the oplog reaches back.
        Oplog = "oplog",
        /// The MongoDB user of this process.
        Roles = "roles",
        /// Whether the connection to MongoDB is encrypted.
        Tls = "tls",
        /// The version of the schema.
        Schema = "schema",
        /// The validators of the collections.
        Validators = "validators",
        /// The indexes.
        Indexes = "indexes",
        /// The capped collections of hints and events.
        Rings = "rings",
        /// The leading recruiter.
        Leader = "leader",
        /// The cleaners.
        Cleaners = "cleaners",
        /// How long the cleaners keep the archive.
        Retention = "retention",
        /// The workers.
        Workers = "workers",
        /// The releases of the processes.
        Releases = "releases",
        /// Locked jobs whose worker is gone.
        Stuck = "stuck",
        /// Due jobs that no process runs.
        Waiting = "waiting",
        /// The documents of limits, groups and pauses.
        Settings = "settings",
    }

    /// The name, for programs.
    fn name;
}

/// One thing that was examined, and how it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was examined.
    pub check: Check,
    /// How it stands.
    pub state: State,
    /// One or two sentences for people: what is, and what to do. Safe for a terminal.
    pub text: String,
}

impl Finding {
    fn new(check: Check, state: State, text: impl Into<String>) -> Self {
        Self { check, state, text: text.into() }
    }

    fn good(check: Check, text: impl Into<String>) -> Self {
        Self::new(check, State::Good, text)
    }

    fn warning(check: Check, text: impl Into<String>) -> Self {
        Self::new(check, State::Warning, text)
    }

    fn error(check: Check, text: impl Into<String>) -> Self {
        Self::new(check, State::Error, text)
    }

    /// What could not be read, with the role that is missing.
    fn unknown(check: Check, role: &str, error: &StoreError) -> Self {
        let text = if error.is_unauthorized() {
            format!("this MongoDB user may not read it: give it the role {role} to have it examined")
        } else {
            format!("it could not be read: {}", chain(error))
        };
        Self::new(check, State::Unknown, text)
    }
}

impl Store {
    /// Examines the whole installation. There is at least one finding of each check; those of one check are together. What could not be read
    /// is a finding, too.
    pub async fn findings(&self) -> Vec<Finding> {
        let (server, stored, fleet, waiting) =
            tokio::join!(server::findings(self), stored::findings(self), fleet::findings(self), waiting::findings(self));
        [server, stored, fleet, waiting].concat()
    }
}

/// A number of any type, as MongoDB's replies have them, without its fraction.
fn number(document: &Document, field: &str) -> Option<i64> {
    let value = document.get(field)?;
    integer(Some(value)).or_else(|| value.as_f64()?.trunc().to_string().parse().ok())
}

/// The findings that were made, or a good one if there are none.
fn or_good(findings: Vec<Finding>, check: Check, text: impl Into<String>) -> Vec<Finding> {
    if findings.is_empty() { vec![Finding::good(check, text)] } else { findings }
}
