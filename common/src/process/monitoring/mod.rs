//! Metrics and probes over HTTP: the flag, the recorder of this process, and what each path answers.
//!
//! Used by the three programs. `main` calls [`MetricsArgs::serve`] before anything else is made: a handle that is made without a recorder
//! does nothing. [`meters`](crate::meters) has the metrics, the room `health` what the probes answer.
//!
//! | file | content |
//! |---|---|
//! | `server` | the pages |

mod server;

use std::{fmt, io, str::FromStr, time::Duration};

use clap::Args;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use self::server::{Answer, Pages};
use crate::{
    base::{Address, pause},
    health, meters,
};

/// How often the values of histograms are gathered, if they are not read. Until then each value takes memory.
const GATHER_EVERY: Duration = Duration::from_secs(5);

/// Whether and where a process serves metrics and probes.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Monitoring", about = None, long_about = None, mut_args = crate::base::flags::unless_empty)]
pub struct MetricsArgs {
    /// Serve metrics of this process for Prometheus at /metrics of this address, and probes at /livez and /readyz. For example
    /// 127.0.0.1:9464; with port 0, at a free port, which the log names. Without encryption and password: use a loopback address, or a
    /// network that you trust [default: none]
    #[arg(long, env = "RECRUITER_METRICS", value_name = "HOST:PORT")]
    metrics: Option<MetricsAddress>,
}

/// A host, by its name or IP address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MetricsAddress(Address);

/// The value of `--metrics` is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a host and a port such as 127.0.0.1:9464, [::1]:9464 or localhost:9464")]
struct InvalidMetricsAddress(String);

impl FromStr for MetricsAddress {
    type Err = InvalidMetricsAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.trim().parse().map(Self).map_err(|_| InvalidMetricsAddress(text.to_owned()))
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Metrics cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MonitoringError {
    /// The address cannot be used.
    #[error("cannot serve metrics at {address} (--metrics, RECRUITER_METRICS): {}", advice(.source))]
    Address {
        /// The address.
        address: String,
        /// Why not.
        source: io::Error,
    },
    /// This process has a recorder already.
    #[error("cannot record metrics (--metrics, RECRUITER_METRICS)")]
    Recorder(#[from] BuildError),
}

/// What to do about an address that cannot be used.
fn advice(error: &io::Error) -> &'static str {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the others have no advice of their own")]
    match error.kind() {
        io::ErrorKind::AddrInUse => "another process listens there; give each process a port of its own, or port 0 for a free one",
        io::ErrorKind::AddrNotAvailable => "it is no address of this machine; use 127.0.0.1, or an address that `ip address` lists",
        io::ErrorKind::PermissionDenied => "this user may not listen there; use a port above 1023",
        _ => "use an address of this machine, such as 127.0.0.1:9464",
    }
}

/// Serves metrics and probes until it is dropped.
#[derive(Debug)]
#[must_use = "nothing is served after it is dropped"]
pub struct Monitoring {
    _server: AbortOnDropHandle<()>,
    _gathering: AbortOnDropHandle<()>,
}

impl MetricsArgs {
    /// Nothing is served.
    pub const NONE: Self = Self { metrics: None };

    /// Makes the recorder of this process and serves what it records, if that is wanted. `program` is its name in `recruiter_build_info`.
    ///
    /// # Errors
    /// When the address cannot be used.
    pub async fn serve(&self, program: &'static str) -> Result<Option<Monitoring>, MonitoringError> {
        let Some(address) = &self.metrics else { return Ok(None) };
        let MetricsAddress(Address { host, port }) = address;
        let unusable = |source| MonitoringError::Address { address: address.to_string(), source };
        let listener = TcpListener::bind((host.as_str(), *port)).await.map_err(unusable)?;
        let at = listener.local_addr().map_err(unusable)?;
        let recorder = record(program)?;
        tracing::info!(address = %at, "serving metrics at /metrics, and probes at /livez and /readyz");
        if !at.ip().is_loopback() {
            tracing::warn!(
                address = %at,
                "metrics are served to everyone who reaches this address, without encryption and password: they name classes, groups and resources; use 127.0.0.1, or a network that you trust"
            );
        }
        let gathering = recorder.clone();
        let gathering = async move {
            loop {
                pause(GATHER_EVERY).await;
                gathering.run_upkeep();
            }
        };
        Ok(Some(Monitoring {
            _server: AbortOnDropHandle::new(tokio::spawn(server::run(listener, Of { recorder }))),
            _gathering: AbortOnDropHandle::new(tokio::spawn(gathering)),
        }))
    }
}

/// Installs the recorder of this process.
fn record(program: &'static str) -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for meter in meters::ALL {
        if let Some(buckets) = meter.kind.buckets() {
            builder = builder.set_buckets_for_metric(Matcher::Full(meter.name.into()), buckets)?;
        }
    }
    let recorder = builder.install_recorder()?;
    meters::describe();
    meters::BUILD_INFO.gauge(&[program, env!("CARGO_PKG_VERSION")]).set(1.0);
    Ok(recorder)
}

/// The pages of this process.
struct Of {
    recorder: PrometheusHandle,
}

impl Pages for Of {
    fn metrics(&self) -> String {
        meters::READY.gauge(&[]).set(if health::readiness().is_ok() { 1.0 } else { 0.0 });
        meters::MAIN_LOOP_AGE.gauge(&[]).set(health::progress_age().unwrap_or_default().as_secs_f64());
        self.recorder.render()
    }

    fn live(&self) -> Answer {
        health::live()
    }

    fn ready(&self) -> Answer {
        health::readiness()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for text in ["127.0.0.1:9464", "[::1]:0", "localhost:65535", " 0.0.0.0:1\n"] {
            assert_eq!(text.parse::<MetricsAddress>().map(|address| address.to_string()).as_deref(), Ok(text.trim()));
        }
        for text in ["9464", ":9464", "localhost", "localhost:", "localhost:65536", "http://localhost:9464", "127.0.0.1:9464/metrics"] {
            let refused = text.parse::<MetricsAddress>().expect_err(text).to_string();
            assert!(refused.contains(text) && refused.contains("127.0.0.1:9464, [::1]:9464"), "{refused}");
        }
    }
}
