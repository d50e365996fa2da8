//! What a long-lived program says in one line: messages about its job, or the answer.
//!
//! Each field is read by itself. A wrong value is corrected, or ignored with a line in the job's log, and never changes which answer it is
//! part of. So no value costs a process or an attempt. Only a line that is not of the protocol does.

use std::{collections::BTreeMap, time::Duration};

use bson::Bson;
use recruiter_common::{failure::Failure, instant::delay_of_ms, job::JobProgress};
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Value, value::RawValue};

use super::messages::{count, json, mended, quoted};
use crate::{
    context::Context,
    outcome::{Done, NotDone},
};

/// The error class of a result that cannot be stored.
const RESULT: &str = "result";
/// The fields of an answer, in the order of their importance.
const ANSWERS: [&str; 3] = ["error", "snooze", RESULT];

/// A line of a process.
pub(super) struct Said {
    id: f64,
    fields: Fields,
}

impl Said {
    /// Reads a line, or the beginning of one that was too long. Fails if it is not of the protocol.
    pub(super) fn read(line: &[u8], is_cut: bool) -> Result<Self, String> {
        let mut fields = Fields::read(&mended(line));
        if let (Some((None, problem)), false) = (&fields.problem, is_cut) {
            return Err(problem.clone());
        }
        if let (Some((_, problem)), true) = (&mut fields.problem, is_cut) {
            *problem = "it is too long".into();
        }
        let id = fields.value("id").ok_or("its job is missing: each line has its `id`")?;
        let id = id.and_then(|id| id.as_f64().or_else(|| id.as_str()?.parse().ok()).ok_or("its `id` is not a number".into()))?;
        Ok(Self { id, fields })
    }

    pub(super) fn is_about(&self, number: u32) -> bool {
        (self.id - f64::from(number)).abs() < 0.5
    }

    /// Does what the messages say.
    pub(super) fn note(&self, job: &Context) {
        for (field, value) in &self.fields.read {
            let noted = match field.as_str() {
                "progress" => progress(value).map(|progress| job.progress(progress)),
                "checkpoint" => json(value.get()).and_then(|value| job.checkpoint(value).map_err(|error| error.to_string())),
                "extend_ms" => delay(value).map(|by| _ = job.extend(by)),
                "log" => {
                    job.log(text(value));
                    Ok(())
                }
                _ => Ok(()),
            };
            noted.unwrap_or_else(|problem| ignore(field, &problem, value.get(), job));
        }
        if let Some((Some(field), problem)) = &self.fields.problem
            && !ANSWERS.contains(&field.as_str())
        {
            ignore(field, problem, "", job);
        }
    }

    /// The answer, if the line has one.
    pub(super) fn answer(self, job: &Context) -> Option<Result<Done, NotDone>> {
        let problem = self.fields.problem.as_ref().and_then(|(field, problem)| Some((field.as_deref()?, problem)));
        let answer = ANSWERS.into_iter().find_map(|answer| {
            let value = self.fields.read.get(answer).filter(|value| answer == RESULT || value.get() != "null");
            value
                .map(|value| (answer, Ok(value)))
                .or_else(|| problem.filter(|(field, _)| *field == answer).map(|(_, why)| (answer, Err(why))))
        });
        Some(match answer? {
            ("error", Ok(value)) => Err(error(value, job)),
            ("snooze", Ok(value)) => Err(snooze(value, job)),
            (_, Ok(value)) => match json(value.get()) {
                Ok(Bson::Null) => Ok(Done::default()),
                Ok(result) => Ok(Done { result: Some(result) }),
                Err(problem) => Err(NotDone::give_up(RESULT, format!("the result cannot be stored: {problem}"))),
            },
            (RESULT, Err(problem)) => Err(NotDone::give_up(RESULT, format!("the result cannot be stored: {problem}"))),
            (answer, Err(problem)) => Err(NotDone::failed("error", format!("the `{answer}` of the program cannot be read: {problem}"))),
        })
    }
}

/// The fields of an object, as texts.
#[derive(Default)]
struct Fields {
    read: BTreeMap<String, Box<RawValue>>,
    /// What is wrong behind them, and in which field, if that is known.
    problem: Option<(Option<String>, String)>,
}

impl Fields {
    fn read(text: &str) -> Self {
        let (mut fields, mut source) = (Self::default(), serde_json::Deserializer::from_str(text));
        let read = fields.deserialize(&mut source).and_then(|()| source.end());
        if let Err(error) = read {
            fields.problem.get_or_insert((None, error.to_string()));
        }
        fields
    }

    fn value(&self, field: &str) -> Option<Result<Value, String>> {
        self.read.get(field).map(|value| parsed(value))
    }

    /// A field that is there and not null, as something. A wrong one is ignored.
    fn read_as<T>(&self, field: &str, read: impl FnOnce(&RawValue) -> Result<T, String>, job: &Context) -> Option<T> {
        let value = self.read.get(field).filter(|value| value.get() != "null")?;
        read(value).map_err(|problem| ignore(field, &problem, value.get(), job)).ok()
    }

    fn failure(&self, class: &str, job: &Context) -> Failure {
        let text_of = |field| self.read_as(field, |value| Ok(text(value)), job).filter(|text| !text.is_empty());
        let class = text_of("class").unwrap_or_else(|| class.into());
        let failure = Failure::new(class, text_of("message").unwrap_or_else(|| "the program gave no message".into()));
        match text_of("trace") {
            Some(trace) => failure.with_trace(trace),
            None => failure,
        }
    }
}

impl<'de> DeserializeSeed<'de> for &mut Fields {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<(), D::Error> {
        source.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Fields {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(field) = map.next_key::<String>()? {
            match map.next_value() {
                Ok(value) => _ = self.read.insert(field, value),
                Err(error) => {
                    let problem = error.to_string();
                    self.problem = Some((Some(field), problem.clone()));
                    return Err(A::Error::custom(problem));
                }
            }
        }
        Ok(())
    }
}

fn error(value: &RawValue, job: &Context) -> NotDone {
    let Some(said) = object(value) else { return NotDone::failed("error", text(value)) };
    if let Some(delay) = said.read_as("retry_after_ms", delay, job) {
        job.retry_after(delay);
    }
    let failure = said.failure("error", job);
    // Some languages have 1 and 0, or texts, for true and false.
    let gives_up =
        said.read.get("give_up").is_some_and(|value| !["false", "null", "0", "\"\"", "\"0\"", "\"false\""].contains(&value.get()));
    if gives_up { NotDone::GiveUp(failure) } else { NotDone::Failed(failure) }
}

fn snooze(value: &RawValue, job: &Context) -> NotDone {
    let said = object(value).unwrap_or_else(|| {
        ignore("snooze", "it is not an object", value.get(), job);
        Fields::default()
    });
    let at_most = |value: &RawValue| number(value).map(|times| count(times.max(0.0)).and_then(|times| times.try_into().ok()));
    NotDone::Snooze {
        after: said.read_as("after_ms", delay, job),
        reason: said.failure("snoozed", job),
        at_most: said.read_as("at_most", at_most, job).flatten(),
    }
}

fn object(value: &RawValue) -> Option<Fields> {
    Some(Fields::read(value.get())).filter(|fields| fields.problem.is_none())
}

fn progress(value: &RawValue) -> Result<JobProgress, String> {
    let Some(said) = object(value) else { return number(value).map(JobProgress::from) };
    let number_of = |field| said.read.get(field).map(|value| number(value)).transpose();
    let progress = match (number_of("done")?, number_of("of")?, number_of("percent")?) {
        (Some(done), Some(of), _) => count(done).zip(count(of)).map(JobProgress::from).ok_or("a count is not negative")?,
        (_, _, Some(percent)) => percent.into(),
        _ => JobProgress::default(),
    };
    let words = said.read.get("text").filter(|value| value.get() != "null");
    Ok(match words {
        Some(words) => progress.text(text(words)),
        None => progress,
    })
}

/// Milliseconds. Below zero they are none, and too many are the longest time.
fn delay(value: &RawValue) -> Result<Duration, String> {
    delay_of_ms(number(value)?).ok_or_else(|| "it is not a number".into())
}

fn number(value: &RawValue) -> Result<f64, String> {
    parsed(value)?.as_f64().ok_or_else(|| "it is not a number".into())
}

/// A text, or the JSON of another value.
fn text(value: &RawValue) -> String {
    serde_json::from_str(value.get()).unwrap_or_else(|_| value.get().to_owned())
}

fn parsed(value: &RawValue) -> Result<Value, String> {
    serde_json::from_str(value.get()).map_err(|error| format!("it is not JSON: {error}"))
}

/// Warns about a field, in the logs of the worker and of the job.
fn ignore(field: &str, problem: &str, value: &str, job: &Context) {
    let value = quoted(value.as_bytes());
    let (shown, why) = (job.may_log(&value), job.may_log(problem));
    tracing::warn!(job.id = %job.job_id(), job.class = job.class(), field, value = shown, problem = why, "ignoring what a program says");
    job.log(format!("ignored `{field}`: {problem}: {value}").trim_end_matches([' ', ':']));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str) -> (Option<Result<Done, NotDone>>, Context) {
        let job = Context::for_tests().build();
        let said = Said::read(line.as_bytes(), false).unwrap_or_else(|problem| panic!("{line}: {problem}"));
        assert!(said.is_about(1), "{line}");
        said.note(&job);
        (said.answer(&job), job)
    }

    #[test]
    fn a_wrong_value_changes_nothing_but_itself() {
        for (line, log) in [
            (r#"{"id": 1, "log": 5}"#, "5"),
            (r#"{"log": {"a": ["\ud83d"]}, "id": 1.0}"#, "{\"a\": [\"\u{fffd}\"]}"),
            (r#"{"id": "1", "log": "caf\udce9 \ud83d\ude00 \\ud83d \"NaN\""}"#, "caf\u{fffd} 😀 \\ud83d \"NaN\""),
            (r#"{"id": 1, "progress": {"percent": "most"}}"#, "ignored `progress`: it is not a number: {\"percent\": \"most\"}"),
            (r#"{"id": 1, "progress": {"done": -1, "of": 2}}"#, "ignored `progress`: a count is not negative: {\"done\": -1, \"of\": 2}"),
            (r#"{"id": 1, "extend_ms": [1]}"#, "ignored `extend_ms`: it is not a number: [1]"),
            (r#"{"id": 1, "checkpoint": {"$oid": 5}}"#, "ignored `checkpoint`: it cannot be stored"),
            (r#"{"id": 1, "checkpoint": [9223372036854775808]}"#, "ignored `checkpoint`: it cannot be stored: `0`: 9223372036854775808 "),
            (r#"{"id": 1, "checkpoint": undefined}"#, "ignored `checkpoint`: expected value"),
        ] {
            let (answer, job) = said(line);
            assert_eq!(answer, None, "{line}");
            let lines = job.log_lines();
            assert!(lines.len() == 1 && lines[0].starts_with(log), "{line}: {lines:?}");
        }
        for (line, progress) in [
            (r#"{"id": 1, "progress": {"done": 2.7, "of": 10.2, "text": 7}}"#, "2 of 10 (20 %), 7"),
            (r#"{"id": 1, "progress": 12.5, "extend_ms": -0.5}"#, "12.5 %"),
        ] {
            assert_eq!(said(line).1.last_progress().unwrap().to_string(), progress);
        }
        assert_eq!(said(r#"{"id": 1, "log": NaN}"#).1.log_lines().len(), 1);
    }

    #[test]
    fn a_wrong_value_does_not_change_the_answer() {
        let failure = |class: &str, message: &str| Failure::new(class, message);
        let answers = |line: &str, answer: Result<Done, NotDone>| assert_eq!(said(line).0, Some(answer), "{line}");
        answers(r#"{"id": 1, "error": {"class": 5, "message": ["a"], "give_up": 1}}"#, Err(NotDone::GiveUp(failure("5", "[\"a\"]"))));
        let odd = r#"{"id": 1, "error": {"class": "caf\udce9", "message": "m", "give_up": true, "retry_after_ms": NaN}}"#;
        answers(odd, Err(NotDone::GiveUp(failure("caf\u{fffd}", "m"))));
        answers(r#"{"id": 1, "error": "boom", "snooze": null}"#, Err(NotDone::Failed(failure("error", "boom"))));
        answers(r#"{"id": 1, "error": null, "result": null}"#, Ok(Done::default()));
        let snooze = |after, at_most| {
            let reason = failure("snoozed", "the program gave no message");
            Err(NotDone::Snooze { after, reason, at_most })
        };
        answers(r#"{"id": 1, "snooze": {"after_ms": -0.5, "at_most": 2.5}}"#, snooze(Some(Duration::ZERO), Some(2)));
        answers(r#"{"id": 1, "snooze": {"after_ms": 1e300, "at_most": "x"}}"#, snooze(Some(Duration::MAX), None));
        answers(r#"{"id": 1, "snooze": {"after_ms": "soon"}}"#, snooze(None, None));
        answers(r#"{"id": 1, "snooze": 60}"#, snooze(None, None));
    }

    #[test]
    fn a_result_that_cannot_be_stored_is_given_up() {
        let deep = format!("{}{}", "[".repeat(5_000), "]".repeat(5_000));
        for result in ["NaN", "[1, -Infinity]", "1e999", "undefined", "{\"$oid\": 5}", &deep] {
            let (answer, _) = said(&format!(r#"{{"id": 1, "result": {result}}}"#));
            assert!(matches!(&answer, Some(Err(NotDone::GiveUp(failure))) if failure.class == RESULT), "{answer:?}");
        }
        let cut = Said::read(br#"{"id": 1, "result": ["a", "b"#, true).unwrap();
        let Some(Err(NotDone::GiveUp(failure))) = cut.answer(&Context::for_tests().build()) else { panic!("not given up") };
        assert_eq!(failure.message, "the result cannot be stored: it is too long");
        let (cut, job) = (Said::read(br#"{"id": 1, "log": "xx"#, true).unwrap(), Context::for_tests().build());
        cut.note(&job);
        assert_eq!((cut.answer(&job), job.log_lines()), (None, vec!["ignored `log`: it is too long".to_owned()]));
    }

    #[test]
    fn other_lines_are_not_of_the_protocol() {
        for line in
            ["", "Traceback (most", "[1]", "{}", r#"{"result": 1}"#, r#"{"id": "x"}"#, r#"{"id": 1, "result": 1} x"#, "{\"id\"", "NaN"]
        {
            assert!(Said::read(line.as_bytes(), false).is_err(), "{line}");
        }
    }
}
