//! Texts and documents that are nearly right: one of those below, changed at a few places. No parser panics, an error is a sentence of
//! limited length, and what was understood is understood again as it is written.
//!
//! bolero chooses the changes: in the tests for a second each, at random. `BOLERO_RANDOM_TEST_TIME_MS=600000` is ten minutes, and
//! `cargo bolero test` lets the coverage guide them. What was once misunderstood stays in the lists.

use std::{fmt::Display, fs, str::FromStr};

use bson::{Document, RawDocumentBuf, doc, oid::ObjectId};
use recruiter_common::{
    ConnectArgs, Pattern, Rate,
    job::Job,
    limits::{MaintenanceWindow, Paused},
    schedules::{StoredSchedule, Timing},
    spec::{
        JobSpec, UnknownPolicies, duration_of_text, id_of_text, instant_of_text, items_of_text, message_of_text, parameters_of_text,
        policy_of_text,
    },
};
use recruiter_tests::factory::minimal_job;
use recruiter_worker::stock;

/// Which seed, and where it is changed, and how.
type Changes = (u8, Vec<(u16, u8, u8)>);

/// What is put into a text, besides single bytes.
const PIECES: [&str; 24] = [
    "\0",
    "\u{1b}[2J",
    "\u{202e}",
    "ä",
    "\u{1f980}",
    "\n",
    " ",
    "\"",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "-",
    "0",
    "99999999999999999999",
    "1e308",
    "null",
    "true",
    "\u{feff}",
    "$",
    "'",
];

/// A seed with its changes.
fn changed(seeds: &[impl AsRef<[u8]>], (seed, changes): &Changes) -> Vec<u8> {
    let mut text = seeds[usize::from(*seed) % seeds.len()].as_ref().to_vec();
    for (at, how, byte) in changes.iter().take(6) {
        let at = usize::from(*at) % (text.len() + 1);
        let until = (at + usize::from(*byte % 16)).min(text.len());
        match how % 6 {
            0 => drop(text.drain(at..until)),
            1 => text.insert(at, *byte),
            2 if at < text.len() => text[at] = *byte,
            3 => drop(text.splice(at..at, PIECES[usize::from(*byte) % PIECES.len()].bytes())),
            4 => {
                let part = text[at..until].to_vec();
                drop(text.splice(at..at, part));
            }
            _ => {
                let other = seeds[usize::from(*byte) % seeds.len()].as_ref();
                text.truncate(at);
                text.extend_from_slice(&other[at.min(other.len())..]);
            }
        }
    }
    text
}

/// An error is for people.
fn check<T, E: Display>(input: &[u8], read: Result<T, E>) -> Option<T> {
    read.map_err(|error| {
        let said = error.to_string();
        let is_sentence = said.len() > 8 && said.len() < 2_000;
        assert!(is_sentence, "{:?} gives the error {said:?}", String::from_utf8_lossy(input));
    })
    .ok()
}

/// What is read is the same when it is written and read again.
fn reads_what_it_writes<T: FromStr<Err: Display> + Display>(text: &str) {
    if let Some(value) = check(text.as_bytes(), text.parse::<T>()) {
        let written = value.to_string();
        let again = written.parse::<T>().map(|again| again.to_string()).map_err(|error| error.to_string());
        assert_eq!(again, Ok(written.clone()), "{text:?} is written as {written:?}");
    }
}

/// Each text that is UTF-8.
fn texts(seeds: &[&str], try_one: impl Fn(&str) + std::panic::RefUnwindSafe) {
    seeds.iter().for_each(|seed| try_one(seed));
    bolero::check!().with_type::<Changes>().for_each(|changes| {
        if let Ok(text) = String::from_utf8(changed(seeds, changes)) {
            try_one(&text);
        }
    });
}

#[test]
fn settings_of_limits_and_topics() {
    let seeds = [
        "100/1s burst 20",
        "1/1m",
        "5/1h 30m burst 7",
        "02:00-03:00 Europe/Berlin",
        "22:00-06:00 UTC mon,tue",
        "everything",
        "group:mail",
        "line:a:b",
    ];
    texts(&seeds, |text| {
        reads_what_it_writes::<Rate>(text);
        reads_what_it_writes::<MaintenanceWindow>(text);
        reads_what_it_writes::<Paused>(text);
        reads_what_it_writes::<Pattern>(text);
    });
}

/// A run is after the date that it is asked for, and there are no two at once.
#[test]
fn times_of_schedules() {
    let seeds =
        ["0 3 * * *", "*/5 * * * * *", "0 0 29 2 *", "0 9 * * 1-5", "0 12 L * *", "30 2 * * 7#1", "0 0 1,15 * FRI", "59 23 31 12 *"];
    texts(&seeds, |text| {
        for zone in ["UTC", "Europe/Berlin", "Pacific/Apia"] {
            let Some(timing) = check(text.as_bytes(), Timing::cron(text, zone)) else { continue };
            let start = "2026-10-24T00:00:00Z".parse().unwrap();
            let slots: Vec<_> = timing.slots_after(start).take(5).collect();
            assert!(slots.first().is_none_or(|first| *first > start) && slots.is_sorted_by(|a, b| a < b), "{text:?}: {slots:?}");
        }
    });
}

#[test]
fn jobs_as_json() {
    let seeds = [
        r#"{"class": "checksum", "parameters": {"path": "/tmp/x", "size": {"$numberLong": "5"}}, "group": "mail", "priority": 3}"#,
        r#"{"class": "a", "items": [{"n": 1}, {"n": 2.5}], "after": "1h 30m", "unique": {"key": "k", "until": "started"}, "keep": "failures"}"#,
        r#"{"id": "65f000000000000000000001", "class": "a", "scheduled_at": "2026-01-01T00:00:00Z", "expires_after": "5m", "tags": ["x"]}"#,
        r#"{"class": "a", "retry_policy": {"class": "RetryManyTimes", "parameters": {"retry_how_many_times": 5, "seconds_to_wait_before_retry": 60}}, "limits": ["printer"]}"#,
    ];
    seeds.iter().for_each(|seed| drop(seed.parse::<JobSpec>().unwrap()));
    bolero::check!().with_type::<Changes>().for_each(|changes| {
        let line = changed(&seeds, changes);
        if let Some(Some(spec)) = check(&line, JobSpec::of_line(&line)) {
            check(&line, spec.into_job(UnknownPolicies::Accept));
        }
    });
}

#[test]
fn values_of_flags() {
    let seeds = [
        r#"{"path": "/tmp/x", "at": {"$date": "2026-01-01T00:00:00Z"}}"#,
        r#"[{"n": 1}, {"n": 2}]"#,
        "RetryManyTimes",
        r#"{"class": "TimeTable", "parameters": {"seconds": [1, 60]}}"#,
        "2026-01-01T00:00:00Z",
        "2026-10-25 02:30",
        "1h 30m",
        "5s",
        "65f000000000000000000001",
    ];
    texts(&seeds, |text| {
        let input = text.as_bytes();
        check(input, parameters_of_text(text));
        check(input, message_of_text(text));
        check(input, items_of_text(text));
        check(input, policy_of_text(text));
        check(input, instant_of_text(text));
        check(input, duration_of_text(text));
        check(input, id_of_text(text));
    });
}

/// A document that is no job stays whole.
#[test]
fn documents() {
    let bytes = |document: &Document| document.to_vec().unwrap();
    let schedule =
        doc! { "_id": "nightly", "cron": "0 3 * * *", "zone": "UTC", "every_ms": null, "job": { "class": "a", "parameters": {} } };
    let mut full = minimal_job("a");
    full.extend(doc! { "priority": 5, "limits": ["a"], "last_execution": { "worker": ObjectId::new() }, "attempts": 3, "tags": ["x"] });
    let seeds = [bytes(&minimal_job("a")), bytes(&full), bytes(&schedule)];
    bolero::check!().with_type::<Changes>().for_each(|changes| {
        let input = changed(&seeds, changes);
        let Ok(document) = RawDocumentBuf::from_bytes(input.clone()) else { return };
        if let Err((whole, error)) = Job::try_from(document.clone()) {
            assert_eq!(whole, document);
            check::<(), _>(&input, Err(error));
        }
        check(&input, StoredSchedule::try_from(document));
    });
}

#[test]
fn connection_strings() {
    let seeds = [
        "mongodb://127.0.0.1:27017/jobs?replicaSet=rs0",
        "mongodb://ada:hidden-word@a:1,b:2/jobs?authSource=admin&tls=true",
        "mongodb://ada:hidden-word/jobs",
        "mongodb://ada:a?hidden-word@h/jobs",
        "mongodb://ada:%ähidden-word@h/jobs",
        "mongodb:/ada:hidden-word@a:1/jobs?x=://",
        "mongodb://h/?w=majority&readConcernLevel=local&compressors=zlib",
    ];
    texts(&seeds, |text| {
        if let Err(error) = ConnectArgs::to(text).check() {
            let said = error.to_string();
            assert!(!said.contains("hidden-word"), "{text:?} gives the error {said:?}");
            check::<(), _>(text.as_bytes(), Err(said));
        }
    });
}

#[test]
fn workables() {
    let seeds = [
        "[workables.checksum]\ncommand = [\"sh\", \"--\", \"{path}\"]\ntimeout = \"30s\"\nconcurrency = 2\n",
        "[workables.a]\ncommand = [\"sh\"]\nmode = \"long-lived\"\nresult_limit = \"64KiB\"\nkill_after = \"5s\"\nenv = { A = \"b\" }\n",
        "[workables.b]\ncommand = [\"sh\"]\nretry = { class = \"RetryManyTimes\", parameters = { retry_how_many_times = 5, seconds_to_wait_before_retry = 60 } }\nlimits = [\"printer\"]\n",
    ];
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("workables.toml");
    let load = |text: &[u8]| {
        fs::write(&file, text).unwrap();
        stock::load(&file).map(drop)
    };
    seeds.iter().for_each(|seed| load(seed.as_bytes()).unwrap());
    bolero::check!().with_type::<Changes>().for_each(|changes| {
        let text = changed(&seeds, changes);
        check(&text, load(&text));
    });
}
