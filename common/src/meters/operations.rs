//! The operations of MongoDB: how long each takes, and how often it fails.

use std::{sync::LazyLock, time::Duration};

use elsa::sync::FrozenMap;
use metrics::{Counter, Histogram};

use super::{DATABASE_ERRORS, DATABASE_SECONDS, OTHER};
use crate::health;

/// Maximum number of operations with handles of their own. The names of operations are constants of the source, and there are fewer.
pub const MOST_OPERATIONS: usize = 256;

/// Why an operation has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// MongoDB has answered with an error.
    Refused,
    /// MongoDB could not be reached, or has no primary.
    Unreachable,
    /// There was no answer in time.
    Unanswered,
}

/// The handles of one operation.
struct Operation {
    seconds: Histogram,
    refused: Counter,
    unreachable: Counter,
    unanswered: Counter,
}

impl Operation {
    fn new(name: &str) -> Self {
        let errors = |problem| DATABASE_ERRORS.counter(&[name, problem]);
        Self {
            seconds: DATABASE_SECONDS.histogram(&[name]),
            refused: errors("refused"),
            unreachable: errors("unreachable"),
            unanswered: errors("unanswered"),
        }
    }
}

static KNOWN: LazyLock<FrozenMap<&'static str, Box<Operation>>> = LazyLock::new(FrozenMap::new);

fn of(name: &'static str) -> &'static Operation {
    KNOWN.get(name).unwrap_or_else(|| {
        let name = if KNOWN.len() < MOST_OPERATIONS { name } else { OTHER };
        KNOWN.insert(name, Box::new(Operation::new(name)))
    })
}

/// Notes the end of an operation.
pub(crate) fn ended(name: &'static str, took: Duration, problem: Option<Problem>) {
    let operation = of(name);
    operation.seconds.record(took);
    match problem {
        None => {}
        Some(Problem::Refused) => operation.refused.increment(1),
        Some(Problem::Unreachable) => operation.unreachable.increment(1),
        Some(Problem::Unanswered) => operation.unanswered.increment(1),
    }
    health::database(matches!(problem, None | Some(Problem::Refused)));
}
