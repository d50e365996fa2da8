//! `recruiter import php-recruiter`: enqueues what waits in the collections of the PHP library Recruiter (`recruiterphp/recruiter`), and
//! declares its repeatable jobs as schedules.
//!
//! The documents are those of the releases 2 to 5. The library gives its collections the same names as this job system: `scheduled`,
//! `schedulers`, `roster`. So an import whose source would be its own target is refused before anything is read.
//!
//! | file | contents |
//! |---|---|
//! | `jobs` | what a document in `scheduled` becomes |
//! | `policies` | the retry policies of the library as those of this job system |
//! | `roster` | which jobs the living workers of the library have |
//! | `schedulers` | what a document in `schedulers` becomes |

mod jobs;
mod policies;
mod roster;
mod schedulers;

use std::{collections::BTreeMap, io::Write, time::Duration};

use anyhow::Context as _;
use bson::{Bson, Document, RawDocumentBuf, doc};
use clap::Args;
use mongodb::Database;
use recruiter_common::{
    NewJob,
    shutdown::Shutdown,
    spec::duration_of_text,
    store::{ConnectArgs, Store, lossy},
};

use self::{
    jobs::{Jobs, Slots},
    roster::Roster,
    schedulers::Schedulers,
};
use super::{
    super::exit::usage,
    Source, number,
    taking::{Reason, Taking},
};

pub(super) const EXAMPLES: &str = "\
Stop the processes of the library first: a job that they run after the import runs twice.

Examples:
  recruiter import php-recruiter --database shop --dry-run
  recruiter import php-recruiter --database shop --zone Europe/Rome
      the jobs in the collections scheduled and schedulers of the database shop
  recruiter --collection-prefix jobs_ import php-recruiter
      the same, where both use one database

The collections of the library have the same names as those of this job system. So they must be in
another database, or this job system must have a prefix. Left alone are jobs that a worker of the
library has, those that may not run again, and those whose repetition or retry policy has no
counterpart; each is named with the reason.";

#[derive(Args, Clone, Debug)]
pub(in crate::cli) struct PhpArgs {
    #[command(flatten)]
    source: Source,
    /// How long a worker of the library may be silent until it counts as dead (its `--considered-dead-after`). What it had locked is taken
    /// over, unless the job had begun and its retry policy does not repeat it
    #[arg(long, env = "RECRUITER_IMPORT_DEAD_AFTER", value_name = "DURATION", default_value = "30m", value_parser = duration_of_text)]
    dead_after: Duration,
    /// Take over jobs with retry policies of your own: your workers know them under the names of their PHP classes
    #[arg(long, env = "RECRUITER_IMPORT_CUSTOM_POLICY", value_parser = clap::builder::BoolishValueParser::new())]
    custom_policy: bool,
}

/// Why a document is left alone.
type Left = (Reason, String);

fn malformed(why: impl Into<String>) -> Left {
    (Reason::Malformed, why.into())
}

#[expect(clippy::disallowed_methods, reason = "the collections of another library")]
pub(super) async fn run(args: PhpArgs, connect: &ConnectArgs, shutdown: &Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    // Without `--database` it is the database of this job system. The connection would name the library's collections as an application's.
    if args.source.database.is_none() {
        refuse_collision(None, connect)?;
    }
    let store = args.source.store(connect).await?;
    let database = args.source.database(&store);
    if database.name() == store.database().name() {
        refuse_collision(Some(database.name()), connect)?;
    }
    refuse_own(&database).await?;
    let collection = |name: &str| database.collection::<RawDocumentBuf>(name);
    let now = store.now();
    let roster = Roster::read(&collection("roster"), now, args.dead_after).await?;
    roster.warn()?;

    let mut taking = Taking::new(&store, "the PHP library", &args.source, out);
    let mut schedulers = Schedulers::new(&args.source.zone, args.custom_policy);
    taking.collection(&collection("schedulers"), shutdown, |document| schedulers.convert(document)).await?;
    let slots = slots(&store, schedulers, &taking).await?;
    let jobs = Jobs { now: store.now(), roster, slots, custom_policy: args.custom_policy };
    taking.collection(&collection("scheduled"), shutdown, |document| jobs.convert(document)).await?;
    let name = database.name();
    let nothing = format!("neither {name}.scheduled nor {name}.schedulers has documents; --database names the database of the library");
    taking.finish(shutdown, &nothing).await
}

/// Without a prefix, the collections of both have the same names.
fn refuse_collision(database: Option<&str>, connect: &ConnectArgs) -> anyhow::Result<()> {
    if !connect.collection_prefix.is_empty() {
        return Ok(());
    }
    let database = database.map_or_else(|| "the database of the connection string".to_owned(), |name| format!("the database `{name}`"));
    Err(usage(format!(
        "the jobs would be read from {database}, and enqueued there: the library and this job system give the collection `scheduled` the same \
         name. Name the library's database with --database, and another one for this job system in --uri; or give this job system a \
         --collection-prefix"
    )))
}

/// Refuses the database of another installation of this job system: its documents look like those of the library.
async fn refuse_own(database: &Database) -> anyhow::Result<()> {
    #[expect(clippy::disallowed_methods, reason = "the collection of another installation")]
    let metadata = database.collection::<Document>("metadata");
    let name = database.name();
    let schema = metadata.find_one(doc! { "_id": "schema" }).await.with_context(|| format!("cannot read {name}.metadata"))?;
    match schema {
        None => Ok(()),
        Some(_) => Err(usage(format!(
            "the collections of the database `{name}` are those of this job system ({name}.metadata has a document `schema`), not those of the \
             PHP library: name another one with --database"
        ))),
    }
}

/// The slots that the declared schedules run from now on.
async fn slots(store: &Store, schedulers: Schedulers<'_>, taking: &Taking<'_, impl Write>) -> anyhow::Result<BTreeMap<String, Slots>> {
    let mut timings = schedulers.into_timings();
    timings.retain(|urn, _| taking.declared().contains(urn));
    let names: Vec<String> = timings.keys().cloned().collect();
    let now = store.now();
    let mut created = BTreeMap::new();
    for stored in store.schedules_by_name(&names).await? {
        let stored = lossy(&stored);
        if let (Ok(name), Ok(at)) = (stored.get_str("_id"), stored.get_datetime("created_at")) {
            created.insert(name.to_owned(), at.to_chrono());
        }
    }
    // A dry run has not declared them.
    let slots = |(urn, timing): (String, _)| {
        let since = created.get(&urn).copied().unwrap_or(now);
        (urn, Slots { timing, since })
    };
    Ok(timings.into_iter().map(slots).collect())
}

/// What a `workable` is here, and its retry policy: the class with the method, unless that is `execute`, and the parameters.
fn workable(document: &Document, custom_policy: bool) -> Result<(NewJob, Option<String>), Left> {
    let workable = document.get_document("workable").map_err(|_| malformed("it has no `workable`"))?;
    let class = workable.get_str("class").map_err(|_| malformed("its workable has no `class`"))?;
    let class = match workable.get("method") {
        None => class.to_owned(),
        Some(Bson::String(method)) if method == "execute" => class.to_owned(),
        Some(Bson::String(method)) => format!("{class}::{method}"),
        Some(_) => return Err(malformed("the `method` of its workable is no text")),
    };
    let parameters = match workable.get("parameters") {
        Some(Bson::Document(parameters)) => parameters.clone(),
        None | Some(Bson::Null) => doc! {},
        // PHP stores an array without keys as an array, also an empty one.
        Some(Bson::Array(list)) if list.is_empty() => doc! {},
        Some(other) => doc! { "parameters": other.clone() },
    };
    let policy = document.get("retry_policy").ok_or_else(|| malformed("it has no `retry_policy`"))?;
    let (policy, note) = policies::translated(policy, custom_policy)?;
    Ok((NewJob::of_class(class, parameters).retry_stored(policy), note))
}

/// A count as PHP stores it: an integer, or a float where it was calculated.
fn count(document: &Document, field: &str) -> Result<u32, Left> {
    let Some(value) = document.get(field) else { return Ok(0) };
    let whole = number(value).filter(|count| count.fract() == 0.0 && (0.0..=1e9).contains(count));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is whole and within the bounds of u32")]
    whole.map(|count| count as u32).ok_or_else(|| malformed(format!("its `{field}` is no count")))
}
