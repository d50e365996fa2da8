//! `recruiter jobs why`: why a job does not run, and what to do about it.
//!
//! The reasons come in the order in which the system would meet them, and only the first is shown. Limits and pauses are judged by the same
//! function as in the recruiter.

use std::io::Write;

use anyhow::anyhow;
use bson::{Document, doc};
use recruiter_common::{
    ids::JobId,
    instant::Instant,
    job::{Job, JobState},
    limits::line_of_gate,
    roster::PermitHolder,
    store::{ConnectArgs, Head, Lane, Store},
};

use super::{
    limits::{described, explained, holder_to_document, write_holders},
    output::{Format, apart, json_line, moment, printable},
    presence::{Leader, Workers},
};
use crate::leader::admission::{Admission, Reason};

/// Maximum number of jobs that are named of a full resource.
const HOLDERS: usize = 10;

/// Why a job does not run.
pub(super) struct Why {
    /// A name for programs.
    pub(super) name: &'static str,
    /// One or two sentences for people: the reason, and what to do.
    pub(super) text: String,
    /// The workers that hold the permits of a full resource, and their jobs.
    holders: Vec<PermitHolder>,
}

impl Why {
    pub(super) fn new(name: &'static str, text: impl Into<String>) -> Self {
        Self { name, text: text.into(), holders: Vec::new() }
    }
}

/// Writes why a job does not run.
///
/// # Errors
/// When there is no such job, or MongoDB cannot be used.
pub(super) async fn run(id: JobId, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter jobs").await?;
    let stored = store.job(id).await?.ok_or_else(|| anyhow!("no job has the id {id}, neither in `scheduled` nor in `archived`"))?;
    let why = match Job::try_from(stored.document) {
        Ok(job) => why(&store, &job).await?,
        Err((_, error)) => {
            let text = format!(
                "the document is not a job, and a worker that gets it archives it as malformed: {}",
                printable(&error.to_string(), 400)
            );
            Why::new("malformed", text)
        }
    };
    if format.json {
        let holders: Vec<Document> = why.holders.iter().map(holder_to_document).collect();
        return Ok(json_line(out, doc! { "_id": id, "reason": why.name, "text": why.text, "holders": holders })?);
    }
    writeln!(out, "{}: {}", why.name, why.text)?;
    write_holders(&why.holders, out)
}

async fn why(store: &Store, job: &Job) -> anyhow::Result<Why> {
    let now = store.now();
    match &job.state {
        JobState::Archived { why } => Ok(Why::new("finished", format!("it is finished, with the reason `{why}`"))),
        JobState::Started { worker, .. } => {
            let Workers(workers) = Workers::find(store).await?;
            let holder =
                workers.iter().find(|other| other.document.get_object_id("_id").is_ok_and(|id| id == bson::oid::ObjectId::from(*worker)));
            Ok(match holder {
                Some(holder) if holder.is_alive() => Why::new("running", format!("it runs on worker {worker}")),
                _ => Why::new(
                    "dead-worker",
                    format!("its worker {worker} seems to be dead; a cleaner ends the execution, so check that recruiter-cleaner runs"),
                ),
            })
        }
        JobState::Scheduled { .. } if job.is_waiting => waits_for(store, job).await,
        JobState::Scheduled { at } if *at > now => Ok(Why::new(
            "not-due",
            format!("it is due in {} ({}); `recruiter jobs retry {}` makes it due now", apart(*at, now), moment(*at), job.id),
        )),
        JobState::Scheduled { at } => why_due(store, job, *at, now).await,
    }
}

async fn why_due(store: &Store, job: &Job, at: Instant, now: Instant) -> anyhow::Result<Why> {
    let lane = Lane { gate: job.gate.clone(), ..Lane::new(&job.group, &job.class) };
    let mut facts = Facts::find(store, &job.group, now).await?;
    if let Some(why) = facts.why_nobody(&lane) {
        return Ok(why);
    }
    let line = head_of_line(store, job).await?;
    if let Some(head) = line.as_ref().map(|line| line.job.id).filter(|head| *head != job.id) {
        let key = job.gate.as_deref().and_then(line_of_gate).unwrap_or_default();
        return Ok(behind(key, head));
    }
    if let (Some(gate), Some(pause)) = (&job.gate, line.and_then(|line| line.halt)) {
        facts.admission.halt(gate, pause);
    }
    facts.why_not_now(store, &lane, &format!("it has been due for {}", apart(at, now))).await
}

/// A job that waits for an earlier one of its line.
pub(super) fn behind(key: &str, head: JobId) -> Why {
    let text = format!(
        "it is in the line `{}` behind job {head}, which must be finished first; `recruiter jobs why {head}` says more",
        printable(key, 80)
    );
    Why::new("behind", text)
}

/// What decides whether the jobs of a group may start.
pub(super) struct Facts {
    leader: Leader,
    workers: Workers,
    pub(super) admission: Admission,
    now: Instant,
}

impl Facts {
    pub(super) async fn find(store: &Store, group: &str, now: Instant) -> anyhow::Result<Self> {
        let (leader, workers) = (Leader::find(store).await?, Workers::find(store).await?);
        let mut admission = Admission::seen_from_outside(store.settings().await?, &store.permit_holders().await?, now);
        if admission.groups_to_count().iter().any(|limited| limited == group) {
            admission.set_without_permit(group, store.running_without_permit(group).await?);
        }
        Ok(Self { leader, workers, admission, now })
    }

    /// Why no process assigns or takes jobs of this lane.
    pub(super) fn why_nobody(&self, lane: &Lane) -> Option<Why> {
        if self.leader.is_missing() {
            return Some(Why::new("no-recruiter", format!("{}; start `recruiter run`", self.leader.line())));
        }
        let reason = self.workers.why_nobody_takes(&lane.class, &lane.group)?;
        Some(Why::new("no-worker", format!("{reason}; start one that does")))
    }

    /// Why the next due job of this lane does not run. `waiting` says how long it has been due.
    pub(super) async fn why_not_now(&self, store: &Store, lane: &Lane, waiting: &str) -> anyhow::Result<Why> {
        if let Some(reason) = self.admission.why(lane, self.now) {
            let why = explain(&reason, self.now);
            return Ok(match &reason {
                Reason::Full { resource, .. } => Why { holders: store.holders_of_resource(resource, HOLDERS).await?, ..why },
                Reason::Paused(..) | Reason::Undefined(_) | Reason::Invalid(_) | Reason::Maintenance { .. } | Reason::Rate { .. } => why,
            });
        }
        let takes = |worker: &&super::presence::Worker| {
            let has_class = worker.classes.contains(&lane.class);
            worker.is_alive() && has_class && worker.work_on.as_ref().is_some_and(|work_on| work_on.includes(&lane.group))
        };
        let free: i64 =
            self.workers.0.iter().filter(takes).map(|worker| recruiter_common::roster::free_slots_of(&worker.document, &lane.class)).sum();
        Ok(if free == 0 {
            Why::new(
                "no-free-slot",
                format!(
                    "{waiting}, and all slots of the workers that take it are in use, or all that they have for its class; add workers, or raise \
                     its priority"
                ),
            )
        } else if let Some(rate) = self.admission.rates(lane).next() {
            Why::new("rate", format!("{waiting}; it may wait for the rate of `{}`: {}", printable(&rate.0, 80), rate.1))
        } else {
            Why::new(
                "assignable",
                format!(
                    "{waiting}, and nothing keeps it from being assigned; if this lasts for seconds, see the logs of the recruiter and the workers"
                ),
            )
        })
    }
}

/// Maximum number of jobs that are named for which a job waits.
const NAMED: usize = 5;

async fn waits_for(store: &Store, job: &Job) -> anyhow::Result<Why> {
    let ends = store.ends_of(&job.parents()).await?;
    let open: Vec<JobId> = job.parents().into_iter().filter(|parent| !ends.contains_key(parent)).collect();
    if open.is_empty() {
        let text =
            "all jobs that it waited for have ended; the leading recruiter releases it within a poll interval, so check that one leads";
        return Ok(Why::new("released-soon", text));
    }
    let named: Vec<String> = open.iter().take(NAMED).map(ToString::to_string).collect();
    let more = if open.len() > NAMED { format!(" and {} more", open.len() - NAMED) } else { String::new() };
    let text = format!(
        "it waits for the end of {}{more}; `recruiter jobs why {}` says more",
        named.join(", "),
        named.first().map_or_else(String::new, Clone::clone)
    );
    Ok(Why::new("waits-for-jobs", text))
}

/// The head of the line of this job.
async fn head_of_line(store: &Store, job: &Job) -> anyhow::Result<Option<Head>> {
    let Some(gate) = job.gate.as_deref().filter(|gate| line_of_gate(gate).is_some()) else { return Ok(None) };
    Ok(store.heads_of_lines(&[gate]).await?.remove(gate))
}

/// A refusal of admission in words.
pub(super) fn explain(reason: &Reason, now: Instant) -> Why {
    let quoted = |name: &str| format!("`{}`", printable(name, 80));
    match reason {
        Reason::Paused(paused, pause) => {
            let what = printable(&paused.to_string(), 80);
            Why::new("paused", format!("{what} is {}; `recruiter resume {what}` ends the pause", explained(pause, now)))
        }
        Reason::Undefined(resource) => {
            let text =
                format!("it needs {}, which has no limit yet; set one with `recruiter limits set`, or cancel the job", quoted(resource));
            Why::new("limit-undefined", text)
        }
        Reason::Invalid(resource) => Why::new(
            "limit-invalid",
            format!(
                "the settings of {} are not valid; correct its document, for example with `recruiter limits set` or `recruiter groups set`",
                quoted(resource)
            ),
        ),
        Reason::Full { resource, capacity } => {
            let limit = described(recruiter_common::Limit { capacity: Some(*capacity), rate: None });
            let text = format!("{} is full: {limit}; it waits for one of these jobs to end", quoted(resource));
            Why::new("limit-full", text)
        }
        Reason::Maintenance { group, until } => {
            let text = format!("the maintenance window of group {} ends in {} ({})", quoted(group), apart(*until, now), moment(*until));
            Why::new("maintenance", text)
        }
        Reason::Rate { resource, until } => {
            Why::new("rate", format!("the rate of {} allows the next start in {}", quoted(resource), apart(now, *until)))
        }
    }
}
