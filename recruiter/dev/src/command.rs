//! `recruiter dev`: a MongoDB, a recruiter, a cleaner, workers and the web pages on this machine, for development and for trials.

use std::{io::Write, path::PathBuf};

use anyhow::Context as _;
use bson::doc;
use clap::Args;
use etcetera::BaseStrategy as _;
use recruiter_common::{
    logging::LogArgs,
    shutdown::{Shutdown, Wake},
};

use super::{
    embedded::Options,
    fleet::{Installation, LOOK_EVERY, Plan, Programs, SHORT_LEASE},
};
use recruiter::cli::{output::Format, view::document_line};

/// The arguments of `dev`.
#[derive(Args, Clone, Debug)]
pub struct DevArgs {
    /// Path of the mongod program [default: mongod on PATH, otherwise downloaded once]
    #[arg(long, env = "RECRUITER_MONGOD", value_name = "FILE")]
    mongod: Option<PathBuf>,
    /// Directory of the database, kept between runs [default: recruiter/dev in your data directory]
    #[arg(long, env = "RECRUITER_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Port of MongoDB on 127.0.0.1 [default: the port of the last run if it is free, otherwise another one]
    #[arg(long, env = "RECRUITER_DEV_PORT", value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Port of the web pages and the HTTP API on 127.0.0.1; 0 for none [default: 7420, or a free one]
    ///
    /// Everyone on this machine may change everything there.
    #[arg(long, env = "RECRUITER_DEV_WEB_PORT", value_name = "PORT")]
    web_port: Option<u16>,
    /// Number of worker processes; 0 if you start your own
    #[arg(long, env = "RECRUITER_WORKERS", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=100))]
    workers: u32,
    /// Workables file of the workers: the program of each class; the test classes are always registered
    #[arg(long, env = "RECRUITER_WORKER_CONFIG", value_name = "FILE")]
    worker_config: Option<PathBuf>,
    /// Further arguments for mongod
    #[arg(last = true, value_name = "ARGUMENT")]
    mongod_arguments: Vec<String>,
    #[command(flatten)]
    format: Format,
}

/// Runs until a signal stops it.
///
/// # Errors
/// When a process cannot be started: a program is missing, or the data directory or the port cannot be used. When mongod ends before it is
/// asked to ([`Exit::Unavailable`](recruiter_common::exit::Exit::Unavailable)).
pub async fn run(args: DevArgs, log: &LogArgs, mut shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    let programs = Programs::find()?;
    let data_dir = match args.data_dir {
        Some(given) => given,
        None => etcetera::choose_base_strategy()
            .context("there is no home directory for the database: set --data-dir")?
            .data_dir()
            .join("recruiter/dev"),
    };
    let config = args.worker_config.into_iter().flat_map(|file| ["--config".into(), file.into_os_string(), "--log-stderr".into()]);
    let web = if args.web_port == Some(0) { None } else { Some(args.web_port.unwrap_or_default()) };
    let plan = Plan {
        programs,
        web,
        workers: args.workers,
        recruiter_arguments: vec![SHORT_LEASE.into()],
        worker_arguments: ["--builtins".into()].into_iter().chain(config).collect(),
        log_arguments: log.arguments(),
        log: None,
        pass_settings: true,
    };
    let options = |mongod| Options { port: args.port, arguments: args.mongod_arguments.clone(), ..Options::new(mongod, &data_dir) };
    let mut installation = tokio::select! {
        started = Installation::start(args.mongod, options, plan) => started?,
        () = shutdown.requested() => return Ok(()),
    };
    let (uri, web) = (installation.uri(), installation.fleet.web());
    if args.format.json {
        document_line(out, doc! { "uri": uri, "web": web.map(address) })?;
    } else {
        writeln!(out, "{}", introduction(uri, web, &data_dir.display().to_string()))?;
    }
    out.flush()?;
    let mut tended = Ok(());
    while tended.is_ok() && shutdown.sleep(LOOK_EVERY).await == Wake::Elapsed {
        if let Some(ended) = installation.mongod_ended() {
            return Err(installation.abort(ended).await);
        }
        tended = installation.fleet.tend().map(|told| told.iter().for_each(|line| tracing::warn!("{line}")));
    }
    installation.stop().await?;
    tended
}

fn address(port: u16) -> String {
    format!("http://127.0.0.1:{port}/")
}

fn introduction(uri: &str, web: Option<u16>, data_dir: &str) -> String {
    let pages = web
        .map(|port| format!("\nWeb pages: {} (everyone on this machine may change everything there)\n", address(port)))
        .unwrap_or_default();
    format!(
        "
MongoDB and Recruiter run at {uri} until you press Ctrl-C.{pages}
In another terminal:

  export MONGODB_URI='{uri}'
  recruiter enqueue --class sleep --parameters '{{\"ms\":1000}}'
  recruiter stats
  mongosh \"$MONGODB_URI\"

The database is kept in {data_dir}.
"
    )
}
