//! Identities: one type for each thing that has an `_id`, so that a job can never be taken for a worker.
//!
//! Used by every crate. All are BSON `ObjectId`s, made by the client that creates the thing.

use std::{fmt, str::FromStr};

use bson::{Bson, oid::ObjectId};
use serde::{Deserialize, Serialize};

use crate::instant::Instant;

macro_rules! object_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(ObjectId);

        impl $name {
            /// A fresh identity, unique across processes and machines.
            #[expect(clippy::new_without_default, reason = "every call gives another value")]
            pub fn new() -> Self {
                Self(ObjectId::new())
            }
        }

        impl From<$name> for Bson {
            fn from(id: $name) -> Self {
                Bson::ObjectId(id.0)
            }
        }

        impl From<$name> for ObjectId {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl From<ObjectId> for $name {
            fn from(id: ObjectId) -> Self {
                Self(id)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0.to_hex())
            }
        }

        impl FromStr for $name {
            type Err = bson::error::Error;

            fn from_str(hex: &str) -> Result<Self, Self::Err> {
                ObjectId::parse_str(hex).map(Self)
            }
        }
    };
}

object_id! {
    /// One job, from enqueue to archive: `_id` in `scheduled` and then in `archived`.
    JobId
}
impl JobId {
    /// When it was made, to the second, by the clock of whoever made it: when the job was enqueued, if its document does not say.
    pub fn made_at(self) -> Instant {
        self.0.timestamp().to_chrono()
    }
}

object_id! {
    /// One incarnation of a worker process: `_id` in `roster`. A restart is another worker.
    WorkerId
}
object_id! {
    /// One start of one batch of jobs: the fence that every later write of the outcome must name.
    StartId
}
object_id! {
    /// One round of assignments.
    RoundId
}

/// The term of a recruiter's lease: grows by one with each new leader; zero before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseTerm(pub i64);

impl From<LeaseTerm> for Bson {
    fn from(term: LeaseTerm) -> Self {
        Bson::Int64(term.0)
    }
}

impl fmt::Display for LeaseTerm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
