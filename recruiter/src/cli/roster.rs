//! `recruiter roster`: lists the workers, their groups and classes, their jobs, and their last heartbeats.

use std::io::Write;

use recruiter_common::{
    instant::Instant,
    store::{ConnectArgs, Store},
};

use super::{
    output::{Format, briefly_apart, printable},
    presence::Worker,
    view::{Row, Stored, colour, id_in, left, or_dash, print, right},
};
use crate::views::workers::{self, jobs_of, memory, state, wanted, works_on};

pub(super) async fn run(format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter roster").await?;
    let workers = store.workers().list().await?.0;
    let leader = store.leader().await?;
    let now = store.now();
    print(out, format, "no worker is registered", workers.iter().map(|worker| view(worker, now)))?;
    if !format.json {
        write_overdue(out, workers.iter().filter(|worker| worker.is_overdue()).count())?;
        return Ok(writeln!(out, "{}", leader.line())?);
    }
    out.flush()?;
    if leader.is_missing() {
        writeln!(std::io::stderr(), "{}", leader.line())?;
    }
    Ok(())
}

/// Says that no cleaner runs, if it has left jobs of so many workers.
pub(super) fn write_overdue(out: &mut impl Write, workers: usize) -> std::io::Result<()> {
    match workers {
        0 => Ok(()),
        overdue => writeln!(
            out,
            "no cleaner seems to run: the roster has workers without a heartbeat for more than\n\
             twice their lease ({overdue}); start recruiter-cleaner to rescue their jobs"
        ),
    }
}

/// The document of a worker, and a row with the fields that can be read.
fn view(worker: &Worker, now: Instant) -> Stored {
    let document = &worker.document;
    let text = |field, width| or_dash(document.get_str(field).ok().map(|text| printable(text, width)));
    let number = |field| or_dash(document.get(field).map(|number| printable(&number.to_string(), 12)));
    let (state, tone) = state(worker);
    let seen = document.get_datetime("last_seen_at").map(|at| format!("{} ago", briefly_apart(at.to_chrono(), now)));
    let cells = [
        left("WORKER", or_dash(document.get("_id").map(id_in))),
        left("STATE", state).coloured(colour(tone)),
        left("HOST:PID", format!("{}:{}", text("hostname", 32), number("pid"))).cut_to(10),
        right("FREE", format!("{}/{}", number("free"), number("capacity"))),
        right("JOBS", jobs_of(worker)),
        right("SEEN", seen.unwrap_or_else(|_| "never".into())),
    ];
    let listed = |names: &[String]| printable(&names.join(", "), 1_000);
    let classes = if worker.classes.is_empty() { "no classes".into() } else { format!("classes {}", listed(&worker.classes)) };
    let policies = worker.policies.as_deref().map(|policies| format!("; retry policies {}", listed(policies))).unwrap_or_default();
    let memory = memory(worker).map(|memory| format!("; {memory}")).unwrap_or_default();
    let request = wanted(worker, now).map(|wanted| format!("{wanted}; ")).unwrap_or_default();
    let below = format!("{request}on {}; {}{memory}; {classes}{policies}", printable(&works_on(worker), 200), text("version", 16));
    Stored { document: workers::to_json(worker), row: Row::from(cells).below(Some(below)) }
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};
    use chrono::TimeDelta;

    use super::{
        super::view::{Screen, table},
        *,
    };

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
            let row = view(&Worker::of(document, now()), now()).row;
            assert_eq!(
                (row.cells[1..].iter().map(|cell| cell.text.as_str()).collect::<Vec<_>>(), row.below.as_deref()),
                (expected.to_vec(), Some(below))
            );
        };
        check(doc! {}, ["malformed", "-:-", "-/-", "0", "never"], "on nothing; -; no classes");
        let own = doc! { "available": false, "work_on": [], "last_seen_at": seen(1) };
        check(own, ["idle", "-:-", "-/-", "0", "1s ago"], "on the jobs that it enqueues itself; -; no classes");
        check(
            doc! { "available": true, "hostname": "h", "pid": 7, "work_on": ["a", "b"], "free": 3, "capacity": 4_i64, "working_on": [id],
            "last_seen_at": seen(5), "memory_bytes": 31_719_424_i64, "version": "0.1.0", "classes": ["x", "y"], "policies": ["Mine"], "lease_ms": 20_000 },
            ["available", "h:7", "3/4", "1", "5s ago"],
            "on a, b; 0.1.0; 30.2 MiB; classes x, y; retry policies Mine",
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
            let workers = [Worker::of(worker, now())];
            table(&mut out, Screen { width: 80, colours: false }, &[view(&workers[0], now()).row]).unwrap();
            write_overdue(&mut out, usize::from(workers[0].is_overdue())).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert!(shown(1).lines().all(|line| line.chars().count() <= 80), "{}", shown(1));
        assert!(shown(1).contains("classes class-0, class-1") && shown(1).contains('…'), "{}", shown(1));
        assert!(shown(30).contains("silent") && !shown(30).contains("cleaner"), "{}", shown(30));
        assert!(shown(50).contains("no cleaner seems to run") && shown(50).lines().all(|line| line.chars().count() <= 86), "{}", shown(50));
    }
}
