//! `recruiter import`: takes over what waits in the collections of another job system on the same MongoDB, which are only read. A job keeps its
//! id, so a second import enqueues nothing twice.
//!
//! | file | contents |
//! |---|---|
//! | `taking` | what both do: enqueue, declare, count, and name what is left alone |
//! | `agenda` | the documents of Agenda, for Node |
//! | `php` | the documents of the PHP library Recruiter |

mod agenda;
mod php;
mod taking;

use std::io::Write;

use bson::Bson;
use clap::{Args, Subcommand};
use mongodb::Database;
use recruiter_common::{
    flags::name_of_text,
    schedules::Schedule,
    shutdown::Shutdown,
    store::{ConnectArgs, Store},
};

use super::{connected_to_change, exit::usage, output::Format};

#[derive(Subcommand, Clone, Debug)]
pub(super) enum ImportCommand {
    /// Enqueue what waits in the collection of Agenda (Node), and declare its repeated jobs as schedules
    #[command(after_help = agenda::EXAMPLES)]
    Agenda(agenda::AgendaArgs),
    /// Enqueue what waits in the collections of the PHP library Recruiter, and declare its repeatable jobs as schedules
    #[command(after_help = php::EXAMPLES)]
    PhpRecruiter(php::PhpArgs),
}

/// Where the other system is, and how its jobs are shown.
#[derive(Args, Clone, Debug)]
struct Source {
    /// Database of the other system, on the same MongoDB [default: the database of the connection string]
    #[arg(long, env = "RECRUITER_IMPORT_DATABASE", value_name = "NAME", value_parser = name_of_text)]
    database: Option<String>,
    /// Time zone of the processes of the other system, for repeated jobs that name none
    #[arg(long, env = "RECRUITER_IMPORT_ZONE", value_name = "ZONE", default_value = "UTC")]
    zone: String,
    /// Only show what would be enqueued and declared
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = clap::builder::BoolishValueParser::new())]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

impl Source {
    /// Connects to the database of this job system, and checks the zone before.
    async fn store(&self, connect: &ConnectArgs) -> anyhow::Result<Store> {
        Schedule::cron("0 0 * * *", &self.zone).map(drop).map_err(|problem| usage(format!("--zone: {problem}")))?;
        Ok(connected_to_change(connect, "recruiter import", self.dry_run).await?)
    }

    /// The database of the other system.
    fn database(&self, store: &Store) -> Database {
        store.database().client().database(self.database.as_deref().unwrap_or(store.database().name()))
    }
}

pub(super) async fn run(command: ImportCommand, connect: &ConnectArgs, shutdown: &Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        ImportCommand::Agenda(args) => agenda::run(args, connect, shutdown, out).await,
        ImportCommand::PhpRecruiter(args) => php::run(args, connect, shutdown, out).await,
    }
}

/// A number of any type, if it is finite.
fn number(value: &Bson) -> Option<f64> {
    let whole = value.as_i32().map(i64::from).or(value.as_i64());
    whole.map(|whole| whole as f64).or(value.as_f64()).filter(|number| number.is_finite())
}
