//! `recruiter roster`: who works, on what, and since when nothing was heard of them.

use std::io::Write;

use bson::{Bson, Document};
use clap::Args;
use recruiter_common::{
    instant::Instant,
    store::{ConnectArgs, Store},
};

use crate::output::{Column, Format, apart, json_line, printable, table};

/// How to list workers.
#[derive(Args, Clone, Copy, Debug)]
pub struct RosterArgs {
    #[command(flatten)]
    format: Format,
}

/// Lists the roster.
///
/// # Errors
/// When MongoDB cannot be used.
pub async fn run(args: RosterArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter roster").await?;
    let workers = store.roster_documents().await?;
    if args.format.json {
        return Ok(workers.into_iter().try_for_each(|worker| json_line(out, worker))?);
    }
    let columns = [
        Column::Left("WORKER"),
        Column::Left("STATE"),
        Column::Left("HOST:PID"),
        Column::Left("WORKS ON"),
        Column::Right("FREE/CAPACITY"),
        Column::Right("JOBS"),
        Column::Right("LAST SEEN"),
        Column::Left("VERSION"),
    ];
    let rows: Vec<_> = workers.iter().map(|worker| row(worker, store.now())).collect();
    Ok(table(out, columns, &rows)?)
}

/// Whatever can be read of a document: one that somebody has damaged is shown as far as it goes.
fn row(worker: &Document, now: Instant) -> [String; 8] {
    let text = |field, width| worker.get_str(field).map_or_else(|_| "-".into(), |text| printable(text, width));
    let number = |field| worker.get(field).map_or_else(|| "-".into(), Bson::to_string);
    let state = match (worker.get_bool("retired"), worker.get_bool("available")) {
        (Ok(true), _) => "dead",
        (_, Ok(true)) => "available",
        _ => "busy",
    };
    let works_on = match worker.get("work_on") {
        Some(Bson::Array(groups)) => groups.iter().map(|group| group.as_str().unwrap_or("?")).collect::<Vec<_>>().join(","),
        Some(Bson::String(group)) => group.clone(),
        _ => "-".into(),
    };
    let jobs = match worker.get("working_on") {
        Some(Bson::Array(jobs)) => jobs.len(),
        other => usize::from(other.is_some_and(|job| *job != Bson::Null)),
    };
    [
        worker.get_object_id("_id").map_or_else(|_| "-".into(), |id| id.to_hex()),
        state.into(),
        format!("{}:{}", text("hostname", 32), number("pid")),
        printable(&works_on, 40),
        format!("{}/{}", number("free"), number("capacity")),
        jobs.to_string(),
        worker.get_datetime("last_seen_at").map_or_else(|_| "never".into(), |at| format!("{} ago", apart(at.to_chrono(), now))),
        text("version", 16),
    ]
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn every_worker_has_a_row_however_little_is_known() {
        let check = |worker: Document, expected: [&str; 7]| assert_eq!(row(&worker, Instant::UNIX_EPOCH)[1..], expected);
        check(doc! {}, ["busy", "-:-", "-", "-/-", "0", "never", "-"]);
        let id = bson::oid::ObjectId::new();
        let seen = bson::DateTime::from_millis(-5_000);
        check(
            doc! { "available": true, "hostname": "h", "pid": 7, "work_on": ["a", "b"], "free": 3, "capacity": 4_i64, "working_on": [id], "last_seen_at": seen, "version": "0.1.0" },
            ["available", "h:7", "a,b", "3/4", "1", "5s ago", "0.1.0"],
        );
        check(
            doc! { "retired": true, "available": false, "work_on": "*", "working_on": id },
            ["dead", "-:-", "*", "-/-", "1", "never", "-"],
        );
    }
}
