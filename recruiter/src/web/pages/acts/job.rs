//! Retries, cancels and deletes a job. What is retried may get other parameters.

use axum::{
    Extension,
    extract::{Path, State},
    response::{IntoResponse as _, Redirect},
};
use recruiter_common::{
    control::{Change, Changed, Refusal, Revision},
    ids::JobId,
    job::{Job, Priority},
    json,
    text::printable,
};
use serde_json::{Map, Value};

use super::{
    super::{
        super::{
            Shared, Web,
            audit::Actor,
            changes::{NewContent, Wanted, change, unknown},
            problem::Problem,
            requests::{Id, Parameters},
        },
        form::{Fields, Sent},
        frame::Answer,
        visitor::Visitor,
        words::editable,
    },
    Field, Kind, Question, check, no_such_page,
};
use crate::views::outcome::message;

/// The largest parameters that a form has, in bytes.
const LARGEST: usize = 32 * 1024;

/// What is done with jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum JobAct {
    Retry,
    Cancel,
    Delete,
}

impl JobAct {
    pub(super) fn of_word(word: &str) -> Result<Self, Problem> {
        match word {
            "retry" => Ok(Self::Retry),
            "cancel" => Ok(Self::Cancel),
            "delete" => Ok(Self::Delete),
            _ => Err(no_such_page()),
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Retry => "Retry",
            Self::Cancel => "Cancel",
            Self::Delete => "Delete",
        }
    }

    pub(super) fn wanted(self) -> Wanted {
        Wanted::of(match self {
            Self::Retry => Change::Retry { again: false, with: Box::new(Revision::default()) },
            Self::Cancel => Change::Cancel,
            Self::Delete => Change::Delete,
        })
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
    check(&visitor)?;
    let mut question = Question::new(visitor, "/jobs", act.word(), &format!("job {id}"), format!("/jobs/{id}/{word}"));
    let mut changed = would(&web, &act.wanted().change, id).await?;
    if let Changed::Refused(before @ Refusal::RetriedBefore { .. }) = &changed {
        question.would = format!("Attention: {before}. ");
        question.fields.push(Field::hidden("again", "true"));
        changed = would(&web, &Change::Retry { again: true, with: Box::default() }, id).await?;
    }
    if let Changed::Refused(refusal) = &changed {
        return Err(if *refusal == Refusal::Unknown { unknown(id) } else { Problem::conflict(refusal) });
    }
    if let Changed::EnqueuedAgain { .. } = &changed {
        question.fields.extend(Content::of(&web, id).await?.fields());
    }
    question.would += &format!("The job {}.", message(&changed, true));
    question.is_dangerous = act != JobAct::Retry;
    question.back = format!("/jobs/{id}");
    question.asked()
}

/// Changes a job.
pub(in super::super) async fn act(State(web): Shared, actor: Actor, Path((id, word)): Path<(String, String)>, sent: Sent) -> Answer {
    let (Id(id), act) = (Id::of_text(&id)?, JobAct::of_word(&word)?);
    check(&sent.visitor)?;
    let wanted = if act == JobAct::Retry { Content::of(&web, id).await?.wanted(&sent.fields)? } else { act.wanted() };
    let to = match (change(&web, actor, id, wanted, false).await?, act) {
        (Changed::EnqueuedAgain { new: Some(new), .. }, _) => format!("/jobs/{new}"),
        (_, JobAct::Delete) => "/jobs".into(),
        (_, JobAct::Retry | JobAct::Cancel) => format!("/jobs/{id}"),
    };
    Ok(Redirect::to(&to).into_response())
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
        let is_usable = job.bundle.is_none() && parameters.is_object() && parameters.to_string().len() <= LARGEST;
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
        // One that cannot be seen as it is stays, unless another one is given.
        let group = Some(self.group).filter(|group| printable(group, 256) == *group).unwrap_or_default();
        let group = Field { name: "group", value: group, kind: Kind::Text("Group") };
        let priority = Field { name: "priority", value: self.priority, kind: Kind::Text("Priority, from 0 to 9, higher first") };
        parameters.into_iter().chain([group, priority])
    }

    /// A retry with what is different in a form.
    fn wanted(&self, fields: &Fields) -> Result<Wanted, Problem> {
        let changed = |name: &str, before: &str| Some(fields.text(name).trim()).filter(|text| !text.is_empty() && *text != before);
        let mut content = NewContent { again: fields.text("again") == "true", ..NewContent::default() };
        if let (Some(before), Some(text)) = (&self.parameters, changed("parameters", "")) {
            let after: Value = json::parse(text).map_err(|problem| Problem::bad(format!("the parameters: {problem}")))?;
            if !after.is_object() {
                return Err(Problem::bad("the parameters must be a JSON object"));
            }
            content.set = patch(before, after).as_object().cloned().unwrap_or_default();
        }
        content.group = changed("group", &self.group).map(str::to_owned);
        let priority = changed("priority", &self.priority);
        let of_text = |text: &str| text.parse().ok().and_then(Priority::new).ok_or_else(|| Problem::bad("the priority is from 0 to 9"));
        content.priority = priority.map(of_text).transpose()?;
        content.wanted()
    }
}

/// The merge patch (RFC 7396) that makes one value of another. What is the same is not in it.
fn patch(before: &Value, after: Value) -> Value {
    let (Value::Object(before), Value::Object(after)) = (before, &after) else { return after };
    let removed = before.keys().filter(|name| !after.contains_key(*name)).map(|name| (name.clone(), Value::Null));
    let changed = after.iter().filter(|(name, value)| before.get(*name) != Some(value));
    let changed = changed.map(|(name, value)| (name.clone(), patch(before.get(name).unwrap_or(&Value::Null), value.clone())));
    Value::Object(removed.chain(changed).collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_has_only_what_is_different() {
        let before = serde_json::json!({ "a": 1, "b": { "c": 2, "d": [1], "e": { "$date": "x" } }, "f": "[redacted]" });
        for (after, expected) in [
            (before.clone(), serde_json::json!({})),
            (
                serde_json::json!({ "a": 1, "b": { "c": 3, "d": [1, 2] }, "g": {} }),
                serde_json::json!({ "b": { "c": 3, "d": [1, 2], "e": null }, "f": null, "g": {} }),
            ),
            (serde_json::json!({ "a": { "x": 1 }, "b": 7, "f": "[redacted]" }), serde_json::json!({ "a": { "x": 1 }, "b": 7 })),
        ] {
            assert_eq!(patch(&before, after), expected);
        }
    }
}
