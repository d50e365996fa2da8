//! Changes of jobs, as programs and people want them: of one job, of some, or of all that match.

use std::{
    collections::BTreeSet,
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document, doc};
use recruiter_common::{
    JobFilter,
    control::{Alteration, Change, Changed, Refusal, Report, Revision},
    ids::JobId,
    instant::{Instant, later},
    job::Priority,
    json,
    spec::{duration_of_text, id_of_text, instant_of_text},
    text::printable,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    Web,
    audit::{Actor, job_action, noted},
    problem::Problem,
    requests::Parameters,
};
use crate::views::{filter::FilterArgs, outcome::Outcome};

/// Maximum number of jobs that a request names by their ids.
const MOST_IDS: usize = 1_000;
/// Maximum number of parameters that the audit names.
const NAMED: usize = 100;

/// A change of jobs, and what the audit says about its values.
pub(super) struct Wanted {
    pub(super) change: Change,
    with: Document,
}

impl Wanted {
    pub(super) fn of(change: Change) -> Self {
        Self { change, with: Document::new() }
    }
}

/// The values that were given.
fn given(values: Document) -> Document {
    let is_given = |value: &Bson| *value != Bson::Null && value.as_array().is_none_or(|list| !list.is_empty());
    values.into_iter().filter(|(_, value)| is_given(value)).collect()
}

/// What a retried job has in place of the content of the job that it repeats.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewContent {
    /// Merged into the parameters (of each item of a bundle); `null` removes a field.
    #[schema(value_type = Object)]
    pub(super) set: Map<String, Value>,
    /// The new group.
    pub(super) group: Option<String>,
    /// The new priority, from 0 to 9, higher first.
    #[schema(value_type = Option<u8>)]
    pub(super) priority: Option<Priority>,
    /// Also if the job was retried before.
    pub(super) again: bool,
}

impl NewContent {
    pub(super) fn wanted(self) -> Result<Wanted, Problem> {
        self.wanted_with(Vec::new())
    }

    /// With values that are put into the parameters as they are, at these paths; `None` removes what is there.
    pub(super) fn wanted_with(self, put: Vec<(Vec<String>, Option<Bson>)>) -> Result<Wanted, Problem> {
        // Without the values, which may be secret.
        let fields: BTreeSet<&String> = self.set.keys().chain(put.iter().filter_map(|(path, _)| path.first())).collect();
        let names: Vec<String> = fields.into_iter().take(NAMED).map(|name| printable(name, 80)).collect();
        let with = doc! {
            "set": names, "group": self.group.clone(), "priority": self.priority.map(|priority| priority.to_string()),
            "again": self.again.then_some(true),
        };
        let set = json::to_bson(Value::Object(self.set)).map_err(Problem::impossible)?;
        let mut revision = Revision::default().set(set.as_document().cloned().unwrap_or_default());
        for (path, value) in put {
            revision = revision.put(path, value);
        }
        if let Some(group) = self.group {
            revision = revision.group(group).map_err(Problem::impossible)?;
        }
        if let Some(priority) = self.priority {
            revision = revision.priority(priority);
        }
        Ok(Wanted { change: Change::Retry { again: self.again, with: revision.into() }, with: given(with) })
    }
}

/// The new values of a waiting job.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewValues {
    /// The new priority, from 0 to 9, higher first.
    #[schema(value_type = Option<u8>)]
    pub(super) priority: Option<Priority>,
    /// The new group.
    pub(super) group: Option<String>,
    /// The new instant at which it is due, for example `2030-01-31T18:00:00Z`.
    pub(super) scheduled_at: Option<String>,
    /// In place of `scheduled_at`: the delay from now on, for example `1h 30m`.
    pub(super) after: Option<String>,
}

impl NewValues {
    pub(super) fn wanted(self, now: Instant) -> Result<Wanted, Problem> {
        let at = match (self.scheduled_at, self.after) {
            (Some(_), Some(_)) => return Err(Problem::impossible("`scheduled_at` and `after` exclude each other; give only one of them")),
            (Some(at), None) => Some(instant_of_text(&at).map_err(Problem::impossible)?),
            (None, Some(delay)) => Some(later(now, duration_of_text(&delay).map_err(Problem::impossible)?)),
            (None, None) => None,
        };
        let at_date = at.map(bson::DateTime::from_chrono);
        let with =
            doc! { "priority": self.priority.map(|priority| priority.to_string()), "group": self.group.clone(), "scheduled_at": at_date };
        let change = Alteration::new(self.priority, self.group, at).map(Change::Alter).map_err(Problem::impossible)?;
        Ok(Wanted { change, with: given(with) })
    }
}

/// The jobs of a change of many.
pub(super) enum Many {
    /// Some, by their ids.
    Ids(Vec<JobId>),
    /// All that match: the filter, and what the audit says about it.
    Matching(Box<JobFilter>, Document),
}

impl Many {
    /// Those of a query: `id`, which may be given several times, a filter, or `all`.
    pub(super) fn of(mut given: Parameters, change: &Change, now: Instant) -> Result<Self, Problem> {
        let (ids, all) = (given.take_all("id", |text| id_of_text(text).map_err(|problem| problem.to_string()))?, given.flag("all")?);
        if ids.len() > MOST_IDS {
            return Err(Problem::bad(format!("{} ids are too many: {MOST_IDS} is the limit", ids.len())));
        }
        let named = given.to_document();
        let filter = given.rest::<FilterArgs>()?.at(now);
        if !ids.is_empty() {
            let is_alone = !all && named.is_empty();
            return if is_alone { Ok(Self::Ids(ids)) } else { Err(Problem::bad("`id` cannot be combined with a filter or `all`")) };
        }
        if all && !filter.is_empty() {
            return Err(Problem::bad("`all` cannot be combined with a filter, except `state`"));
        }
        if !all && filter.is_empty() && filter.state.is_none() {
            return Err(Problem::bad("name the jobs: by a filter, or with all=true"));
        }
        let filter = filter.narrowed_to(change).map_err(Problem::bad)?;
        Ok(Self::Matching(filter.into(), doc! { "filter": named, "all": all }))
    }

    /// Without what is newer than this instant.
    pub(super) fn before(mut self, instant: Instant) -> Self {
        if let Self::Matching(filter, _) = &mut self {
            filter.until = Some(filter.until.map_or(instant, |until| until.min(instant)));
        }
        self
    }

    fn target(&self) -> Document {
        match self {
            Self::Ids(ids) => doc! { "jobs": ids.iter().map(ToString::to_string).collect::<Vec<_>>() },
            Self::Matching(_, target) => target.clone(),
        }
    }
}

/// Changes one job.
///
/// # Errors
/// Also when the change of this job is refused.
pub(super) async fn change(web: &Arc<Web>, actor: Actor, id: JobId, wanted: Wanted, dry_run: bool) -> Result<Changed, Problem> {
    let mut target = doc! { "job": id.to_string() };
    let (action, Wanted { change, with }) = (job_action(&wanted.change), wanted);
    target.extend(with);
    let store = web.store.clone();
    let changing = async move {
        let changed = store.control(dry_run).change(&change, &[id]).await?;
        let Some((_, changed)) = changed.into_iter().next() else { return Err(unknown(id)) };
        if let Changed::Refused(refusal) = &changed {
            return Err(if *refusal == Refusal::Unknown { unknown(id) } else { Problem::conflict(refusal) });
        }
        let noted = noted(&Outcome::of(id, &changed, dry_run));
        Ok((changed, noted))
    };
    actor.wants(action, target, dry_run).by(web, changing).await
}

/// Changes many jobs. `within`: when to stop, between two batches.
pub(super) async fn change_many(
    web: &Arc<Web>,
    actor: Actor,
    many: Many,
    wanted: Wanted,
    dry_run: bool,
    within: Option<Duration>,
) -> Result<Report, Problem> {
    let mut target = many.target();
    let (action, Wanted { change, with }) = (job_action(&wanted.change), wanted);
    target.insert("with", with);
    let (store, begun) = (web.store.clone(), Monotonic::now());
    let changing = async move {
        let mut control = store.control(dry_run);
        let report = match many {
            Many::Ids(ids) => {
                let mut report = Report::default();
                for (_, changed) in control.change(&change, &ids).await? {
                    *report.outcomes.entry(changed.word()).or_default() += 1;
                }
                report
            }
            Many::Matching(filter, _) => {
                let is_over = |_: &Report, _: &[_]| match within {
                    Some(within) if begun.elapsed() >= within => ControlFlow::Break(()),
                    Some(_) | None => ControlFlow::Continue(()),
                };
                control.change_all(&change, &filter, is_over).await?
            }
        };
        let (matched, outcomes) = (i64::try_from(report.matched()).unwrap_or(i64::MAX), json::to_bson(json!(report.outcomes)));
        Ok((report, doc! { "matched": matched, "outcomes": outcomes.unwrap_or_default() }))
    };
    actor.wants(action, target, dry_run).by(web, changing).await
}

pub(super) fn unknown(id: JobId) -> Problem {
    Problem::not_found(format!("no job has the id {id}, neither in `scheduled` nor in `archived`"))
}
