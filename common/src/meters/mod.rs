//! What is measured: one table of all metrics, and the handles by which code records values.
//!
//! Used by the programs and the library. The values go to the recorder of the facade [`metrics`] that the process has installed: the programs
//! install the exporter of Prometheus (`--metrics`), an application what it likes. Without a recorder a handle does nothing.
//!
//! A handle is made once, when the thing that measures is made, and never looked up for an event. Therefore a recorder must be installed
//! before. Every label has a bounded number of values: those of an enum, or at most [`MOST_NAMES`] names and `other`.
//!
//! | file | content |
//! |---|---|
//! | `table` | all metrics |
//! | `by_name` | handles for each name of a group, a class or a resource |
//! | `operations` | the operations of MongoDB |

mod by_name;
pub(crate) mod operations;
mod table;

pub use metrics::{Counter, Gauge, Histogram};
use metrics::{Label, Unit};

pub use self::{
    by_name::{ByName, MOST_NAMES, OTHER},
    operations::MOST_OPERATIONS,
    table::*,
};

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number that only grows while the process lives.
    Counter,
    /// A number of now.
    Gauge,
    /// A histogram of calls: seconds, from half a millisecond to ten seconds.
    Calls,
    /// A histogram of jobs: seconds, from a millisecond to two hours.
    Seconds,
    /// A histogram of the sizes of batches.
    Sizes,
}

impl Kind {
    /// The word of Prometheus.
    pub fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Calls | Self::Seconds | Self::Sizes => "histogram",
        }
    }

    /// The upper bounds of the buckets, if it is a histogram.
    pub fn buckets(self) -> Option<&'static [f64]> {
        match self {
            Self::Counter | Self::Gauge => None,
            Self::Calls => Some(&[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]),
            Self::Seconds => {
                Some(&[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 7_200.0])
            }
            Self::Sizes => Some(&[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0]),
        }
    }
}

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    /// Its name.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it measures.
    pub help: &'static str,
}

impl Meter {
    /// The counter with these values of the labels.
    pub fn counter(&self, values: &[&str]) -> Counter {
        debug_assert_eq!(self.kind, Kind::Counter, "{}", self.name);
        metrics::counter!(self.name, self.labelled(values))
    }

    /// The gauge with these values of the labels.
    pub fn gauge(&self, values: &[&str]) -> Gauge {
        debug_assert_eq!(self.kind, Kind::Gauge, "{}", self.name);
        metrics::gauge!(self.name, self.labelled(values))
    }

    /// The histogram with these values of the labels.
    pub fn histogram(&self, values: &[&str]) -> Histogram {
        debug_assert!(self.kind.buckets().is_some(), "{}", self.name);
        metrics::histogram!(self.name, self.labelled(values))
    }

    fn labelled(&self, values: &[&str]) -> Vec<Label> {
        debug_assert_eq!(values.len(), self.labels.len(), "{}", self.name);
        self.labels.iter().zip(values).map(|(label, value)| Label::new(*label, (*value).to_owned())).collect()
    }
}

/// Gives the recorder of this process the description and the unit of each metric.
pub fn describe() {
    for Meter { name, kind, help, .. } in ALL.iter().copied() {
        match kind {
            Kind::Counter => metrics::describe_counter!(name, Unit::Count, help),
            Kind::Gauge if name.ends_with("_seconds") => metrics::describe_gauge!(name, Unit::Seconds, help),
            Kind::Gauge => metrics::describe_gauge!(name, Unit::Count, help),
            Kind::Calls | Kind::Seconds => metrics::describe_histogram!(name, Unit::Seconds, help),
            Kind::Sizes => metrics::describe_histogram!(name, Unit::Count, help),
        }
    }
}

/// A number as the facade wants it. It is exact up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "metrics are floating point numbers")]
pub fn number(count: impl TryInto<u64>) -> f64 {
    count.try_into().unwrap_or(u64::MAX) as f64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_metric_has_a_name_by_the_rules_of_prometheus() {
        let names: BTreeSet<&str> = ALL.iter().map(|meter| meter.name).collect();
        assert_eq!(names.len(), ALL.len(), "a name is there twice");
        for Meter { name, kind, labels, help } in ALL {
            assert!(name.starts_with("recruiter_") && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert_eq!(*kind == Kind::Counter, name.ends_with("_total"), "{name}");
            assert!(!matches!(kind, Kind::Calls | Kind::Seconds) || name.ends_with("_seconds"), "{name}");
            assert!(labels.iter().all(|label| label.bytes().all(|byte| byte.is_ascii_lowercase())), "{name}");
            assert!(help.len() > 10 && !help.ends_with('.'), "{name}: {help}");
        }
    }

    #[test]
    fn the_buckets_grow() {
        for kind in [Kind::Calls, Kind::Seconds, Kind::Sizes] {
            let buckets = kind.buckets().expect("it is a histogram");
            assert!(buckets.windows(2).all(|pair| pair[0] < pair[1]), "{kind:?}");
        }
    }
}
