//! `recruiter roster`: lists the workers, their groups and classes, their jobs, and their last heartbeats.

use std::io::Write;

use anstyle::AnsiColor;
use bson::Bson;
use clap::Args;
use recruiter_common::{
    instant::Instant,
    store::{ConnectArgs, Store},
    workers::Wanted,
};

use super::{
    output::{Column, Format, Row, Screen, briefly_apart, json_line, printable, table, with_state},
    presence::Worker,
};

/// The arguments of `roster`.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct RosterArgs {
    #[command(flatten)]
    format: Format,
}

/// Index of the column with the state.
const STATE: usize = 1;

/// Lists the roster.
///
/// # Errors
/// When MongoDB cannot be used.
pub(super) async fn run(args: RosterArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter roster").await?;
    let workers = store.workers().list().await?.0;
    let leader = store.leader().await?;
    if args.format.json {
        workers.into_iter().try_for_each(|worker| {
            let (state, _) = state(&worker);
            json_line(out, with_state(worker.document, state))
        })?;
        out.flush()?;
        if leader.is_missing() {
            writeln!(std::io::stderr(), "{}", leader.line())?;
        }
        return Ok(());
    }
    write(out, Screen::of_stdout(), &workers, store.now())?;
    Ok(writeln!(out, "{}", leader.line())?)
}

fn write(out: &mut impl Write, screen: Screen, workers: &[Worker], now: Instant) -> std::io::Result<()> {
    if workers.is_empty() {
        return writeln!(out, "no worker is registered");
    }
    let columns = [
        Column::left("WORKER"),
        Column::left("STATE"),
        Column::left("HOST:PID").cut_to(10),
        Column::right("FREE"),
        Column::right("JOBS"),
        Column::right("SEEN"),
    ];
    let rows: Vec<Row> = workers.iter().map(|worker| row(worker, now)).collect();
    table(out, screen, &columns, &rows)?;
    let is_overdue = |worker: &&Worker| worker.is_overdue();
    let overdue = workers.iter().filter(is_overdue).count();
    if overdue > 0 {
        writeln!(
            out,
            "no cleaner seems to run: the roster has workers without a heartbeat for more than\n\
             twice their lease ({overdue}); start recruiter-cleaner to rescue their jobs"
        )?;
    }
    Ok(())
}

/// The state of a worker, and its colour.
fn state(worker: &Worker) -> (&'static str, Option<AnsiColor>) {
    let document = &worker.document;
    let is_worker = document.get_object_id("_id").is_ok() && worker.work_on.is_some();
    match document.get_bool("available") {
        _ if !is_worker => ("malformed", Some(AnsiColor::Red)),
        _ if worker.is_retired => ("dead", Some(AnsiColor::Red)),
        _ if worker.silent_for.is_some() => ("silent", Some(AnsiColor::Yellow)),
        _ if worker.request.as_ref().is_some_and(|request| request.wanted == Wanted::Stop) => ("stopping", Some(AnsiColor::Yellow)),
        _ if worker.request.is_some() => ("quiet", Some(AnsiColor::Yellow)),
        Ok(true) => ("available", Some(AnsiColor::Green)),
        // A process that executes its own jobs is never available for others.
        _ if document.get_array("work_on").is_ok_and(Vec::is_empty)
            && !document.get_array("working_on").is_ok_and(|jobs| !jobs.is_empty()) =>
        {
            ("idle", None)
        }
        _ => ("busy", Some(AnsiColor::Cyan)),
    }
}

/// One row of the list, with the fields of the document that can be read.
fn row(worker: &Worker, now: Instant) -> Row {
    let document = &worker.document;
    let text = |field, width| document.get_str(field).map_or_else(|_| "-".into(), |text| printable(text, width));
    let number = |field| document.get(field).map_or_else(|| "-".into(), |number| printable(&number.to_string(), 12));
    let (state, colour) = state(worker);
    let works_on = match document.get("work_on") {
        Some(Bson::Array(groups)) if groups.is_empty() => "the jobs that it enqueues itself".into(),
        Some(Bson::Array(groups)) => groups.iter().map(|group| group.as_str().unwrap_or("?")).collect::<Vec<_>>().join(", "),
        Some(Bson::String(group)) if group == "*" => "all groups".into(),
        Some(Bson::String(group)) => group.clone(),
        _ => "nothing".into(),
    };
    let jobs = match document.get("working_on") {
        Some(Bson::Array(jobs)) => jobs.len(),
        other => usize::from(other.is_some_and(|job| *job != Bson::Null)),
    };
    let cells = vec![
        document
            .get("_id")
            .map_or_else(|| "-".into(), |id| id.as_object_id().map_or_else(|| printable(&id.to_string(), 24), |id| id.to_hex())),
        state.into(),
        format!("{}:{}", text("hostname", 32), number("pid")),
        format!("{}/{}", number("free"), number("capacity")),
        jobs.to_string(),
        document.get_datetime("last_seen_at").map_or_else(|_| "never".into(), |at| format!("{} ago", briefly_apart(at.to_chrono(), now))),
    ];
    let listed = |names: &[String]| printable(&names.join(", "), 1_000);
    let classes = if worker.classes.is_empty() { "no classes".into() } else { format!("classes {}", listed(&worker.classes)) };
    let policies = worker.policies.as_deref().map(|policies| format!("; retry policies {}", listed(policies))).unwrap_or_default();
    let request = worker.request.as_ref().map(|request| {
        let since = request.at.map_or_else(String::new, |at| format!(", {} ago", briefly_apart(at, now)));
        format!("{} wanted by {}{since}; ", request.wanted.as_str(), printable(&request.by, 80))
    });
    let request = request.unwrap_or_default();
    let below = format!("{request}on {}; {}; {classes}{policies}", printable(&works_on, 200), text("version", 16));
    Row { cells, colour: colour.map(|colour| (STATE, colour)), below: Some(below) }
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};
    use chrono::TimeDelta;

    use super::*;

    fn now() -> Instant {
        Instant::UNIX_EPOCH + TimeDelta::hours(1)
    }

    fn seen(seconds_ago: i64) -> bson::DateTime {
        bson::DateTime::from_chrono(now() - TimeDelta::seconds(seconds_ago))
    }

    #[test]
    fn every_worker_has_a_row_however_little_is_known() {
        let id = bson::oid::ObjectId::new();
        let check = |more: Document, expected: [&str; 5], below: &str| {
            let mut document = more;
            document.insert("_id", id);
            let row = row(&Worker::of(document, now()), now());
            assert_eq!((row.cells[1..].to_vec(), row.below.as_deref()), (expected.map(str::to_owned).to_vec(), Some(below)));
        };
        check(doc! {}, ["malformed", "-:-", "-/-", "0", "never"], "on nothing; -; no classes");
        let own = doc! { "available": false, "work_on": [], "last_seen_at": seen(1) };
        check(own, ["idle", "-:-", "-/-", "0", "1s ago"], "on the jobs that it enqueues itself; -; no classes");
        check(
            doc! { "available": true, "hostname": "h", "pid": 7, "work_on": ["a", "b"], "free": 3, "capacity": 4_i64, "working_on": [id],
            "last_seen_at": seen(5), "version": "0.1.0", "classes": ["x", "y"], "policies": ["Mine"], "lease_ms": 20_000 },
            ["available", "h:7", "3/4", "1", "5s ago"],
            "on a, b; 0.1.0; classes x, y; retry policies Mine",
        );
        check(
            doc! { "retired": true, "work_on": "*", "working_on": id },
            ["dead", "-:-", "-/-", "1", "never"],
            "on all groups; -; no classes",
        );
        check(
            doc! { "available": true, "work_on": "*", "last_seen_at": seen(21), "lease_ms": 20_000_i64 },
            ["silent", "-:-", "-/-", "0", "21s ago"],
            "on all groups; -; no classes",
        );
        let asked = |wanted: &str| {
            doc! { "available": false, "work_on": "*", "last_seen_at": seen(1), "lease_ms": 20_000, "wanted": wanted, "wanted_by": "ada",
            "wanted_at": seen(605) }
        };
        check(asked("quiet"), ["quiet", "-:-", "-/-", "0", "1s ago"], "quiet wanted by ada, 10m ago; on all groups; -; no classes");
        check(asked("stop"), ["stopping", "-:-", "-/-", "0", "1s ago"], "stop wanted by ada, 10m ago; on all groups; -; no classes");
        check(asked("rest"), ["busy", "-:-", "-/-", "0", "1s ago"], "on all groups; -; no classes");
    }

    #[test]
    fn the_roster_fits_the_screen_and_says_that_no_cleaner_runs() {
        let shown = |seconds_ago: i64| {
            let classes: Vec<String> = (0..50).map(|n| format!("class-{n}")).collect();
            let worker = doc! { "_id": bson::oid::ObjectId::new(), "hostname": "h".repeat(60), "pid": 1_234_567, "work_on": "*", "capacity": 10_000,
            "free": 10_000, "last_seen_at": seen(seconds_ago), "lease_ms": 20_000, "classes": classes };
            let mut out = Vec::new();
            write(&mut out, Screen { width: 80, colours: false }, &[Worker::of(worker, now())], now()).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert!(shown(1).lines().all(|line| line.chars().count() <= 80), "{}", shown(1));
        assert!(shown(1).contains("classes class-0, class-1") && shown(1).contains('…'), "{}", shown(1));
        assert!(shown(30).contains("silent") && !shown(30).contains("cleaner"), "{}", shown(30));
        assert!(shown(50).contains("no cleaner seems to run") && shown(50).lines().all(|line| line.chars().count() <= 86), "{}", shown(50));
    }
}
