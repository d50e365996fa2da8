//! The file of `recruiter schedules apply`: a namespace, and its schedules.
//!
//! The whole file is checked before anything is written. An error has its line and column.

use std::{collections::BTreeMap, path::Path};

use recruiter_common::{
    schedules::{InvalidSchedule, Missed, Schedule},
    spec::{Classes, InvalidSpec, JobSpec, UnknownPolicies, duration_of_text},
    toml_file::{self, FileError, Problem},
};
use serde::Deserialize;
use serde_json::{Map, Value};
use toml::Spanned;

use super::exit::problem_of;

/// A namespace and its schedules.
#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) name: String,
    pub(super) schedules: Vec<(String, Schedule)>,
    /// The jobs of these schedules as the file has them.
    jobs: Vec<JobSpec>,
}

impl Namespace {
    /// Gives the jobs the defaults of their classes.
    pub(super) fn with_defaults(mut self, classes: &Classes, unknown_policies: UnknownPolicies) -> Result<Self, InvalidSpec> {
        for ((_, schedule), job) in self.schedules.iter_mut().zip(&self.jobs) {
            let job = job.clone().with_defaults(classes).into_job(unknown_policies)?;
            *schedule = schedule.clone().job(job);
        }
        Ok(self)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    namespace: Spanned<String>,
    #[serde(default)]
    schedules: BTreeMap<Spanned<String>, Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    cron: Option<Spanned<String>>,
    zone: Option<Spanned<String>>,
    every: Option<Spanned<String>>,
    jitter: Option<Spanned<String>>,
    overlap: Option<Spanned<String>>,
    missed: Option<Spanned<String>>,
    missed_limit: Option<Spanned<u16>>,
    job: Spanned<toml::Table>,
}

/// Reads a file of schedules.
pub(super) fn load(path: &Path, unknown_policies: UnknownPolicies) -> Result<Namespace, FileError> {
    toml_file::read("the file of schedules", path, |text| namespace(text, unknown_policies))
}

fn namespace(text: &str, unknown_policies: UnknownPolicies) -> Result<Namespace, Problem> {
    let file: File = toml_file::parse(text).map_err(|Problem(at, problem)| {
        let hint = if problem.contains("`namespace`") { ": it decides which schedules this file may change and remove" } else { "" };
        Problem(at, format!("{problem}{hint}"))
    })?;
    let (at, name) = (file.namespace.span(), file.namespace.into_inner());
    let (mut schedules, mut jobs) = (Vec::with_capacity(file.schedules.len()), Vec::new());
    for (key, entry) in file.schedules {
        let (schedule, job) = schedule(entry, &key, unknown_policies)?;
        let schedule = schedule.in_namespace(&name);
        schedule.check(key.as_ref()).map_err(|problem| {
            // The namespace is the only problem that is not the schedule's own.
            let is_of_namespace = matches!(problem, InvalidSchedule::Name { what: "namespace", .. });
            Problem(if is_of_namespace { at.clone() } else { key.span() }, format!("`{}`: {problem}", key.as_ref()))
        })?;
        schedules.push((key.into_inner(), schedule));
        jobs.push(job);
    }
    if name.is_empty() {
        return Err(Problem(at, "the namespace is empty: give it a name, like the name of your application".into()));
    }
    Ok(Namespace { name, schedules, jobs })
}

fn schedule(entry: Entry, key: &Spanned<String>, unknown_policies: UnknownPolicies) -> Result<(Schedule, JobSpec), Problem> {
    let duration = |text: &Spanned<String>| duration_of_text(text.as_ref()).map_err(|problem| Problem::of(text, problem));
    let schedule = match (&entry.cron, &entry.every, &entry.zone) {
        (Some(cron), None, zone) => {
            Schedule::cron(cron.as_ref(), zone.as_ref().map_or("UTC", |zone| zone.as_ref().as_str())).map_err(|problem| {
                match (&problem, zone) {
                    (InvalidSchedule::Zone { .. }, Some(zone)) => Problem::of(zone, problem),
                    _ => Problem::of(cron, problem),
                }
            })
        }
        (None, Some(_), Some(zone)) => Err(Problem::of(zone, "an interval has no zone: its runs are at its multiples in UTC")),
        (None, Some(every), None) => Schedule::every(duration(every)?).map_err(|problem| Problem::of(every, problem)),
        (None, None, _) | (Some(_), Some(_), _) => Err(Problem::of(key, format!("`{}`: {}", key.as_ref(), InvalidSchedule::NoTiming))),
    };
    let mut schedule = schedule?;
    if let Some(jitter) = &entry.jitter {
        schedule = schedule.jitter(duration(jitter)?);
    }
    if let Some(overlap) = &entry.overlap {
        schedule = schedule.overlap(overlap.as_ref().parse().map_err(|problem: InvalidSchedule| Problem::of(overlap, problem))?);
    }
    schedule = match (&entry.missed, &entry.missed_limit) {
        (Some(word), limit) => {
            let limit = limit.as_ref().map(|limit| *limit.as_ref());
            schedule.missed(Missed::of_word(word.as_ref(), limit).map_err(|problem| Problem::of(word, problem))?)
        }
        (None, Some(limit)) => return Err(Problem::of(limit, InvalidSchedule::LimitWithoutAll)),
        (None, None) => schedule,
    };
    let at = entry.job.span();
    let within = |problem: String| Problem(at.clone(), format!("`job`: {problem}"));
    let spec = json(toml::Value::Table(entry.job.into_inner())).map_err(within)?;
    let spec: JobSpec = serde_json::from_value(spec).map_err(|error| within(error.to_string().replace("unknown field", "unknown key")))?;
    let job = spec.clone().into_job(unknown_policies).map_err(|problem| within(problem_of(&problem)))?;
    Ok((schedule.job(job), spec))
}

/// A value of TOML as JSON. An instant becomes a date of extended JSON.
fn json(value: toml::Value) -> Result<Value, String> {
    Ok(match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => {
            serde_json::Number::from_f64(number).map(Value::Number).ok_or("a number must be finite: leave out nan and inf")?
        }
        toml::Value::Boolean(value) => value.into(),
        toml::Value::Datetime(at) if at.offset.is_some() => serde_json::json!({ "$date": at.to_string() }),
        toml::Value::Datetime(at) => return Err(format!("{at} is no instant: add the offset, like 2030-01-31T18:00:00Z, or write a text")),
        toml::Value::Array(list) => list.into_iter().map(json).collect::<Result<Value, _>>()?,
        toml::Value::Table(table) => {
            table.into_iter().map(|(key, value)| Ok((key, json(value)?))).collect::<Result<Map<_, _>, String>>()?.into()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(schedules: &str) -> Result<Namespace, String> {
        namespace(&format!("namespace = \"shop\"\n{schedules}"), UnknownPolicies::Refuse)
            .map_err(|Problem(at, problem)| format!("{}: {problem}", at.start))
    }

    #[test]
    fn a_file_has_schedules_of_a_namespace() {
        let file = r#"
            [schedules.nightly-report]
            cron = "0 3 * * *"
            zone = "Europe/Berlin"
            overlap = "skip"
            job = { class = "report", parameters = { since = 2030-01-31T18:00:00Z, n = 5 }, group = "reports", priority = 7 }

            [schedules."every minute"]
            every = "1m"
            jitter = "30s"
            missed = "all"
            missed_limit = 10
            [schedules."every minute".job]
            class = "ping"
            items = [{ n = 1 }, {}]
            retry_policy = { class = "RetryForever", parameters = { seconds_to_wait_before_retry = 1 } }
        "#;
        let read = of(file).expect("a file");
        let named: Vec<_> =
            read.schedules.iter().map(|(name, schedule)| (name.as_str(), schedule.to_string(), schedule.missed_policy())).collect();
        assert_eq!(read.name, "shop");
        assert_eq!(
            named,
            [
                ("every minute", "every 1m".to_owned(), Missed::All(10)),
                ("nightly-report", "0 3 * * * Europe/Berlin".to_owned(), Missed::One)
            ]
        );
        assert!(of("").is_ok_and(|read| read.schedules.is_empty()), "it removes all schedules of its namespace");
    }

    #[test]
    fn a_problem_has_its_place_and_its_reason() {
        let check = |body: &str, at: &str, expected: &str| {
            let text = format!("[schedules.a]\n{body}");
            let problem = of(&text).map(|_| ()).expect_err(body);
            let (place, reason) = problem.split_once(": ").expect("a place");
            let place = place.parse::<usize>().expect("a number") - "namespace = \"shop\"\n".len();
            assert!(text[place..].starts_with(at), "{body}: {problem}: {}", &text[place..]);
            assert!(reason.contains(expected), "{body}: {problem}");
        };
        let job = "job = { class = \"c\" }";
        check(&format!("cron = \"0 0 31 2 *\"\n{job}"), "\"0 0 31", "never runs");
        check(&format!("cron = \"0 3 * * *\"\nzone = \"Berlin\"\n{job}"), "\"Berlin\"", "there is no zone `Berlin`");
        check(&format!("every = \"500ms\"\n{job}"), "\"500ms\"", "from 1s");
        check(&format!("every = \"5\"\n{job}"), "\"5\"", "write it like 90s");
        check(&format!("every = \"5m\"\nzone = \"UTC\"\n{job}"), "\"UTC\"", "an interval has no zone");
        check(job, "a]", "either `cron` or `every`");
        check(&format!("every = \"1m\"\njitter = \"2m\"\n{job}"), "a]", "a jitter of 2m is not possible");
        check(&format!("every = \"1m\"\noverlap = \"no\"\n{job}"), "\"no\"", "it must be `allow` or `skip`");
        check(&format!("every = \"1m\"\nmissed = \"two\"\n{job}"), "\"two\"", "`skip`, `one` or `all`");
        check(&format!("every = \"1m\"\nmissed_limit = 5\n{job}"), "5", "needs `missed = \"all\"`");
        check(&format!("every = \"1m\"\nmissed = \"all\"\nmissed_limit = 5000\n{job}"), "a]", "give 1 to 1000");
        check(&format!("every = \"1m\"\nevry = 5\n{job}"), "evry", "unknown key `evry`");
        check("every = \"1m\"", "[schedules.a]", "missing key `job`");
        check("every = \"1m\"\njob = { class = \"\" }", "{ class", "`class` is missing");
        check("every = \"1m\"\njob = { class = \"c\", clas = 1 }", "{ class", "unknown key `clas`");
        check("every = \"1m\"\njob = { class = \"c\", after = \"5m\" }", "a]", "cannot have an id, a date");
        check("every = \"1m\"\njob = { class = \"c\", parameters = { d = 1979-05-27 } }", "{ class", "add the offset");
        check("every = \"1m\"\njob = { class = \"c\", retry_policy = { class = \"Mine\" } }", "{ class", "add --custom-policy");
        assert!(namespace("", UnknownPolicies::Refuse).is_err_and(|Problem(_, problem)| problem.contains("missing key `namespace`")));
        assert!(namespace("namespace = \"\"", UnknownPolicies::Refuse).is_err_and(|Problem(_, problem)| problem.contains("empty")));
    }
}
