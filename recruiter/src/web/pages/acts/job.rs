//! Retries, changes, cancels and deletes a job. What is retried may get other parameters.

use axum::{
    Extension,
    extract::{Path, State},
    response::{IntoResponse as _, Redirect},
};
use bson::Bson;
use recruiter_common::{
    control::{Alteration, Change, Changed, Refusal, Revision},
    ids::JobId,
    instant::Instant,
    job::{Job, Priority},
    json,
    spec::instant_of_text,
    store::REDACTED,
    text::printable,
};
use serde_json::{Map, Value};

use super::{
    super::{
        super::{
            Shared, Web,
            audit::Actor,
            changes::{NewContent, NewValues, Wanted, change, unknown},
            problem::Problem,
            requests::{Id, Parameters},
        },
        LONGEST_FORM,
        form::{Fields, Sent},
        frame::Answer,
        visitor::Visitor,
        words::editable,
    },
    Field, Kind, Question, no_such_page,
};
use crate::views::outcome::message;

/// How much of a form is for other fields than the parameters, in bytes.
const OTHERS: usize = 8 * 1024;

/// What is done with jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum JobAct {
    Retry,
    Change,
    Cancel,
    Delete,
}

impl JobAct {
    pub(super) fn of_word(word: &str) -> Result<Self, Problem> {
        match word {
            "retry" => Ok(Self::Retry),
            "change" => Ok(Self::Change),
            "cancel" => Ok(Self::Cancel),
            "delete" => Ok(Self::Delete),
            _ => Err(no_such_page()),
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Retry => "Retry",
            Self::Change => "Change",
            Self::Cancel => "Cancel",
            Self::Delete => "Delete",
        }
    }

    /// What is asked about: new values are not known yet, and which jobs may get some does not depend on them.
    pub(super) fn asked(self, now: Instant) -> Result<Change, Problem> {
        Ok(match self {
            Self::Retry => Change::Retry { again: false, with: Box::new(Revision::default()) },
            Self::Change => Change::Alter(Alteration::new(None, None, Some(now)).map_err(Problem::impossible)?),
            Self::Cancel => Change::Cancel,
            Self::Delete => Change::Delete,
        })
    }

    /// What is done, with the new values of a form.
    pub(super) fn wanted(self, fields: &Fields, now: Instant) -> Result<Wanted, Problem> {
        match self {
            Self::Change => new_values(fields, "", "")?.wanted(now),
            Self::Retry | Self::Cancel | Self::Delete => Ok(Wanted::of(self.asked(now)?)),
        }
    }

    pub(super) fn is_dangerous(self) -> bool {
        matches!(self, Self::Cancel | Self::Delete)
    }
}

/// What would come out of a change.
async fn would(web: &Web, change: &Change, id: JobId) -> Result<Changed, Problem> {
    let changed = web.store.control(true).change(change, &[id]).await?;
    changed.into_iter().next().map(|(_, changed)| changed).ok_or_else(|| unknown(id))
}

/// Asks before a job is changed.
pub(in super::super) async fn ask(
    State(web): Shared,
    Extension(visitor): Extension<Visitor>,
    Path((id, word)): Path<(String, String)>,
    given: Parameters,
) -> Answer {
    let (Id(id), act) = (Id::of_text(&id)?, JobAct::of_word(&word)?);
    given.end()?;
    question(&web, visitor, id, act).await?.asked()
}

async fn question(web: &Web, visitor: Visitor, id: JobId, act: JobAct) -> Result<Question, Problem> {
    let path = format!("/jobs/{id}/{}", act.word().to_lowercase());
    let mut question = Question::new(visitor, "/jobs", act.word(), &format!("job {id}"), path);
    let mut changed = would(web, &act.asked(web.store.now())?, id).await?;
    if let Changed::Refused(before @ Refusal::RetriedBefore { new }) = &changed {
        question.would = format!("Attention: {before}. ");
        question.fields.push(Field::hidden("again", new));
        changed = would(web, &Change::Retry { again: true, with: Box::default() }, id).await?;
    }
    if let Changed::Refused(refusal) = &changed {
        return Err(if *refusal == Refusal::Unknown { unknown(id) } else { Problem::conflict(refusal) });
    }
    if let Changed::EnqueuedAgain { .. } = &changed {
        question.fields.extend(Content::of(web, id).await?.fields());
    } else if act == JobAct::Change {
        let Content { group, priority, .. } = Content::of(web, id).await?;
        question.fields.extend(fields_of_change(group, priority));
    }
    question.would += &format!("The job {}.", message(&changed, true));
    question.is_dangerous = act.is_dangerous();
    question.back = format!("/jobs/{id}");
    Ok(question)
}

/// Changes a job.
pub(in super::super) async fn act(State(web): Shared, actor: Actor, Path((id, word)): Path<(String, String)>, sent: Sent) -> Answer {
    let (Id(id), act) = (Id::of_text(&id)?, JobAct::of_word(&word)?);
    let now = web.store.now();
    let wanted = match act {
        JobAct::Retry => {
            let again = is_again(&web, id, &sent.fields).await?;
            Content::of(&web, id).await?.wanted(&sent.fields, again)
        }
        JobAct::Change => {
            let Content { group, priority, .. } = Content::of(&web, id).await?;
            new_values(&sent.fields, &group, &priority).and_then(|values| values.wanted(now))
        }
        JobAct::Cancel | JobAct::Delete => act.wanted(&sent.fields, now),
    };
    let wanted = match wanted {
        Ok(wanted) => wanted,
        Err(problem) => return question(&web, sent.visitor, id, act).await?.again(&sent.fields, problem),
    };
    let to = match (change(&web, actor, id, wanted, false).await?, act) {
        (Changed::EnqueuedAgain { new: Some(new), .. }, _) => format!("/jobs/{new}"),
        (_, JobAct::Delete) => "/jobs".into(),
        (_, JobAct::Retry | JobAct::Change | JobAct::Cancel) => format!("/jobs/{id}"),
    };
    Ok(Redirect::to(&to).into_response())
}

/// Whether a form is about the retries that there are: one that is sent twice enqueues one job.
async fn is_again(web: &Web, id: JobId, fields: &Fields) -> Result<bool, Problem> {
    let Some(known) = fields.given("again") else { return Ok(false) };
    let once = Change::Retry { again: false, with: Box::default() };
    Ok(matches!(would(web, &once, id).await?, Changed::Refused(Refusal::RetriedBefore { new }) if new == known))
}

/// What a job has that may be changed before it is enqueued again, as it is shown.
struct Content {
    /// `None` if they are no object, of a bundle, or too large for a form.
    parameters: Option<Value>,
    group: String,
    priority: String,
}

impl Content {
    async fn of(web: &Web, id: JobId) -> Result<Self, Problem> {
        let (stored, redaction) = tokio::try_join!(web.store.job(id), web.store.redaction())?;
        let stored = stored.ok_or_else(|| unknown(id))?;
        let Ok(job) = Job::try_from(redaction.job(stored.document)) else {
            return Ok(Self { parameters: None, group: String::new(), priority: String::new() });
        };
        let parameters = job.parameters.clone().into_relaxed_extjson();
        let is_usable = job.bundle.is_none() && parameters.is_object() && encoded(&editable(&parameters)) + OTHERS <= LONGEST_FORM;
        Ok(Self {
            parameters: is_usable.then_some(parameters),
            group: job.settings.group().to_owned(),
            priority: job.settings.priority().to_string(),
        })
    }

    fn fields(self) -> impl Iterator<Item = Field> {
        let parameters = self.parameters.map(|parameters| Field {
            name: "parameters",
            value: editable(&parameters),
            kind: Kind::Lines("Parameters of the new job"),
        });
        parameters.into_iter().chain(group_and_priority(self.group, self.priority))
    }

    /// A retry with what is different in a form.
    fn wanted(&self, fields: &Fields, again: bool) -> Result<Wanted, Problem> {
        let mut content = NewContent { again, ..NewContent::default() };
        let mut put = Vec::new();
        if let (Some(before), Some(text)) = (&self.parameters, fields.given("parameters")) {
            let after: Value = json::parse(text).map_err(|problem| Problem::bad(format!("the parameters: {problem}")))?;
            if !after.is_object() {
                return Err(Problem::bad("the parameters must be a JSON object"));
            }
            differences(Some(before), Some(after), &mut Vec::new(), &mut put)?;
        }
        content.group = changed(fields, "group", &self.group).map(str::to_owned);
        content.priority = new_priority(fields, &self.priority)?;
        content.wanted_with(put)
    }
}

fn group_and_priority(group: String, priority: String) -> [Field; 2] {
    // One that cannot be seen as it is stays, unless another one is given.
    let group = Some(group).filter(|group| printable(group, 256) == *group).unwrap_or_default();
    let group = Field { name: "group", value: group, kind: Kind::Text("Group") };
    [group, Field { name: "priority", value: priority, kind: Kind::Text("Priority, from 0 to 9, higher first") }]
}

/// The fields for new values of waiting jobs, with those that they have.
pub(super) fn fields_of_change(group: String, priority: String) -> impl Iterator<Item = Field> {
    let label = "Due, for example 2030-01-31T18:00:00Z, or 90m for an hour and a half from now on";
    group_and_priority(group, priority).into_iter().chain([Field { name: "due", value: String::new(), kind: Kind::Text(label) }])
}

/// What a field has, if it is something else than before.
fn changed<'a>(fields: &'a Fields, name: &str, before: &str) -> Option<&'a str> {
    Some(fields.text(name).trim()).filter(|text| !text.is_empty() && *text != before)
}

fn new_priority(fields: &Fields, before: &str) -> Result<Option<Priority>, Problem> {
    let of_text = |text: &str| text.parse().ok().and_then(Priority::new).ok_or_else(|| Problem::bad("the priority is from 0 to 9"));
    changed(fields, "priority", before).map(of_text).transpose()
}

/// The values of a form that are other ones than before.
fn new_values(fields: &Fields, group: &str, priority: &str) -> Result<NewValues, Problem> {
    let due = changed(fields, "due", "").map(str::to_owned);
    let (scheduled_at, after) = if due.as_ref().is_some_and(|due| instant_of_text(due).is_ok()) { (due, None) } else { (None, due) };
    let (group, priority) = (changed(fields, "group", group).map(str::to_owned), new_priority(fields, priority)?);
    Ok(NewValues { priority, group, scheduled_at, after })
}

/// Size of a text in the body of a form, in bytes.
fn encoded(text: &str) -> usize {
    // Browsers send two characters for the end of a line.
    serde_urlencoded::to_string([("", text.replace('\n', "\r\n"))]).map_or(usize::MAX, |text| text.len())
}

/// A path in the parameters, and the value that is put there; `None` removes it.
type Put = (Vec<String>, Option<Bson>);

/// Where a value differs from the one before. What is the same, and so what is hidden in both, is not in it.
fn differences(before: Option<&Value>, after: Option<Value>, path: &mut Vec<String>, found: &mut Vec<Put>) -> Result<(), Problem> {
    match (before, after) {
        (before, after) if before == after.as_ref() => {}
        (Some(Value::Object(before)), Some(Value::Object(mut after)))
            if path.is_empty() || !(is_extended(before) || is_extended(&after)) =>
        {
            let added: Vec<String> = after.keys().filter(|name| !before.contains_key(*name)).cloned().collect();
            for name in before.keys().cloned().chain(added) {
                let (before, after) = (before.get(&name), after.remove(&name));
                path.push(name);
                differences(before, after, path, found)?;
                path.pop();
            }
        }
        (_, after) => {
            let name = printable(&path.join("."), 200);
            if after.as_ref().is_some_and(has_hidden) {
                return Err(Problem::bad(format!(
                    "the parameter `{name}`: a part of it is hidden; write its value in place of {REDACTED}"
                )));
            }
            let value = after.map(json::to_bson).transpose();
            found.push((path.clone(), value.map_err(|problem| Problem::bad(format!("the parameter `{name}`: {problem}")))?));
        }
    }
    Ok(())
}

/// Whether an object stands for a value that JSON does not have, as a date.
fn is_extended(object: &Map<String, Value>) -> bool {
    object.keys().any(|name| name.starts_with('$'))
}

fn has_hidden(value: &Value) -> bool {
    match value {
        Value::String(text) => text == REDACTED,
        Value::Array(list) => list.iter().any(has_hidden),
        Value::Object(object) => object.values().any(has_hidden),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use bson::bson;
    use serde_json::json;

    use super::*;

    fn found(before: &Value, after: Value) -> Result<Vec<(String, Option<Bson>)>, Problem> {
        let mut found = Vec::new();
        differences(Some(before), Some(after), &mut Vec::new(), &mut found)?;
        Ok(found.into_iter().map(|(path, value)| (path.join("."), value)).collect())
    }

    #[test]
    fn only_what_is_different_is_put() {
        let before =
            json!({ "a": 1, "b": { "c": 2, "d": [1], "e": { "$date": "2030-01-31T18:00:00Z" } }, "f": REDACTED, "g": { "h": REDACTED } });
        let put = |path: &str, value: Bson| (path.to_owned(), Some(value));
        let date = bson::DateTime::parse_rfc3339_str("2030-02-01T00:00:00Z").unwrap();
        for (after, expected) in [
            (before.clone(), vec![]),
            (
                json!({ "a": null, "b": { "c": 3, "d": [1, null], "e": { "$date": "2030-02-01T00:00:00Z" } }, "g": { "h": REDACTED, "i": null } }),
                vec![
                    put("a", Bson::Null),
                    put("b.c", bson!(3)),
                    put("b.d", bson!([1, null])),
                    put("b.e", date.into()),
                    ("f".into(), None),
                    put("g.i", Bson::Null),
                ],
            ),
            (
                json!({ "$schema": "x", "a": { "x": null }, "b": 7, "f": REDACTED, "g": { "h": REDACTED } }),
                vec![put("a", bson!({ "x": null })), put("b", bson!(7)), put("$schema", "x".into())],
            ),
        ] {
            assert_eq!(found(&before, after).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_hidden_is_not_put_elsewhere() {
        let before = json!({ "a": [REDACTED, 1], "b": REDACTED });
        for after in [json!({ "a": [REDACTED, 2], "b": REDACTED }), json!({ "a": [REDACTED, 1], "c": { "d": REDACTED } })] {
            assert!(found(&before, after).unwrap_err().into_detail().contains("hidden"));
        }
    }

    #[test]
    fn a_text_is_measured_as_a_browser_sends_it() {
        assert_eq!((encoded("ab"), encoded("\n"), encoded("ü")), (3, 7, 7));
    }
}
