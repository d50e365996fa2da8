//! What decides when a job may run: limits, lines, edges and schedules, checked from the ledger and the archive.
//!
//! An execution lasts from its first line in the ledger to its last. If its worker died, it has ended at the latest with the recorded
//! death: no job system can prevent what a frozen process does when it resumes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bson::Document;
use recruiter_common::{JobId, ids::StartId, limits::Settings};

use crate::{
    ledger::{Event, Line},
    oracle::{Asked, crashed, history, start_of},
};

/// The clock of the server is known with this accuracy, in milliseconds.
const CLOCK: i64 = 100;
/// The first character in the gate of a line.
const LINE: char = '>';

/// A span of time on the machine's monotonic clock, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    begin: i64,
    end: i64,
}

/// The finished jobs, and when they were executed.
#[derive(Debug)]
pub struct Finished<'a> {
    jobs: &'a HashMap<JobId, Document>,
    executions: HashMap<JobId, Vec<Span>>,
    /// MongoDB has executed each start of a job in a span that begins when its worker sent it, and ends when the execution began.
    starts: HashMap<JobId, Vec<Span>>,
}

impl<'a> Finished<'a> {
    /// Reads the executions from the ledger. `clock` is the server's clock minus the monotonic one, in milliseconds.
    pub fn new(jobs: &'a HashMap<JobId, Document>, ledger: &[Line], clock: i64) -> Self {
        let mut lines: HashMap<(JobId, StartId), Vec<&Line>> = HashMap::new();
        for line in ledger {
            lines.entry(line.execution()).or_default().push(line);
        }
        let span = |job: JobId, execution: &Document| {
            let lines = lines.get(&(job, start_of(execution)))?;
            let begin = lines.iter().find(|line| line.event == Event::Begin)?.at_ms;
            let end = lines.iter().find(|line| line.event != Event::Begin).map(|line| line.at_ms);
            let recorded = execution.get_datetime("ended_at").map_or(begin, |at| at.timestamp_millis() - clock - CLOCK);
            let end = match end {
                Some(end) if !crashed(execution) => end,
                Some(end) => end.min(recorded),
                None => recorded,
            };
            Some(Span { begin, end: end.max(begin) })
        };
        let start = |job: JobId, execution: &Document| {
            let begin = execution.get_datetime("started_at").ok()?.timestamp_millis() - clock - CLOCK;
            let begun = lines.get(&(job, start_of(execution))).and_then(|lines| lines.iter().find(|line| line.event == Event::Begin));
            let ended = || execution.get_datetime("ended_at").ok().map(|at| at.timestamp_millis() - clock + CLOCK);
            Some(Span { begin, end: begun.map(|line| line.at_ms).or_else(ended)? })
        };
        let executions = jobs.iter().map(|(id, job)| (*id, history(job).into_iter().filter_map(|one| span(*id, one)).collect())).collect();
        let starts = jobs.iter().map(|(id, job)| (*id, history(job).into_iter().filter_map(|one| start(*id, one)).collect())).collect();
        Self { jobs, executions, starts }
    }

    /// The violations of all constraints.
    pub fn violations(&self, settings: &Settings, asked: &Asked) -> Vec<String> {
        [
            self.beyond_capacities(settings),
            self.beyond_rates(settings),
            self.out_of_line(asked),
            self.before_their_parents(),
            self.schedules(),
        ]
        .concat()
    }

    /// The jobs of each resource.
    fn by_resource(&self) -> BTreeMap<&str, Vec<JobId>> {
        let mut jobs: BTreeMap<&str, Vec<JobId>> = BTreeMap::new();
        for (id, job) in self.jobs {
            for resource in job.get_str("gate").unwrap_or_default().split(',').filter(|resource| !resource.is_empty()) {
                jobs.entry(resource).or_default().push(*id);
            }
        }
        jobs
    }

    fn beyond_capacities(&self, settings: &Settings) -> Vec<String> {
        let too_many = |(resource, jobs): (&str, Vec<JobId>)| {
            let capacity = settings.limit_of(resource)?.capacity?;
            let most = self.most_at_once(jobs);
            (most > capacity as usize).then(|| format!("limits: {most} executions of {resource} at a time, and {capacity} are allowed"))
        };
        self.by_resource().into_iter().filter_map(too_many).collect()
    }

    /// The most executions of these jobs at one instant.
    pub fn most_at_once(&self, jobs: impl IntoIterator<Item = JobId>) -> usize {
        let mut changes = Vec::new();
        for span in jobs.into_iter().filter_map(|job| self.executions.get(&job)).flatten() {
            // At the same millisecond an end comes before a begin.
            changes.extend([(span.begin, 1), (span.end.max(span.begin + 1), 0)]);
        }
        changes.sort_unstable();
        let (mut now, mut most) = (0_usize, 0);
        for (_, is_begin) in changes {
            now = if is_begin == 1 { now + 1 } else { now.saturating_sub(1) };
            most = most.max(now);
        }
        most
    }

    /// In every window of time: starts ≤ burst + rate × time. Only starts count that were certainly executed in the window.
    fn beyond_rates(&self, settings: &Settings) -> Vec<String> {
        let mut violations = Vec::new();
        for (resource, jobs) in self.by_resource() {
            let Some(rate) = settings.limit_of(resource).and_then(|limit| limit.rate) else { continue };
            let mut starts: Vec<Span> = jobs.iter().flat_map(|job| &self.starts[job]).copied().collect();
            starts.sort_unstable_by_key(|start| start.begin);
            for (index, first) in starts.iter().enumerate() {
                let mut last = first.end;
                for (more, start) in starts[index..].iter().enumerate() {
                    last = last.max(start.end);
                    let time = i128::from(last - first.begin);
                    let per = i128::try_from(rate.per.as_millis()).unwrap_or(i128::MAX);
                    let allowed = i128::from(rate.burst) + time * i128::from(rate.starts) / per;
                    if more as i128 + 1 > allowed {
                        violations.push(format!("rates: {} starts of {resource} in {time} ms", more + 1));
                    }
                }
            }
        }
        violations
    }

    /// Jobs of a line that were enqueued one after the other have run one after the other. That they run one at a time is its capacity.
    fn out_of_line(&self, asked: &Asked) -> Vec<String> {
        let mut violations = Vec::new();
        for (line, jobs) in self.by_resource().into_iter().filter(|(resource, _)| resource.starts_with(LINE)) {
            for earlier in &jobs {
                let ended = self.executions[earlier].iter().map(|span| span.end).max();
                for later in jobs.iter().filter(|later| asked.in_order(*earlier, **later)) {
                    let began = self.executions[later].iter().map(|span| span.begin).min();
                    if ended.zip(began).is_some_and(|(ended, began)| began < ended) {
                        let (second, first) = (&self.executions[later], &self.executions[earlier]);
                        violations
                            .push(format!("order: {later} of the line {line} ran before the end of {earlier}: {second:?}, {first:?}"));
                    }
                }
            }
        }
        violations
    }

    /// A job that waits for others runs after their end, if they ended as its edges demand.
    fn before_their_parents(&self) -> Vec<String> {
        let mut violations = Vec::new();
        for (id, job) in self.jobs {
            let Some(began) = self.executions[id].iter().map(|span| span.begin).min() else { continue };
            for edge in job.get_array("waits_for").into_iter().flatten() {
                let (parent, when) = match edge.as_document() {
                    Some(edge) => (edge.get_object_id("job").ok(), edge.get_str("when").unwrap_or("done")),
                    None => (edge.as_object_id(), "done"),
                };
                let parent = JobId::from(parent.expect("an edge names a job"));
                let Some(document) = self.jobs.get(&parent) else {
                    violations.push(format!("graphs: {id} ran, and its parent {parent} is not archived"));
                    continue;
                };
                let done = document.get_bool("done").unwrap_or(false);
                let fits = when == "ended" || document.contains_key("continued_as") || done == (when == "done");
                let ended = self.executions[&parent].iter().map(|span| span.end).max();
                if !fits || ended.is_some_and(|ended| began < ended) {
                    violations.push(format!("graphs: {id} ran at {began}, its parent {parent} ended at {ended:?}, done: {done}"));
                }
            }
        }
        violations
    }

    /// The slots of a schedule with a fixed interval have one job each, without a gap.
    fn schedules(&self) -> Vec<String> {
        let mut schedules: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
        for job in self.jobs.values() {
            if let Ok(schedule) = job.get_document("schedule")
                && let (Ok(name), Ok(slot)) = (schedule.get_str("name"), schedule.get_datetime("slot"))
            {
                schedules.entry(name).or_default().push(slot.timestamp_millis());
            }
        }
        let wrong = |(name, slots): (&str, Vec<i64>)| {
            let distinct: BTreeSet<i64> = slots.iter().copied().collect();
            let sorted: Vec<i64> = distinct.into_iter().collect();
            let gaps: BTreeSet<i64> = sorted.windows(2).map(|pair| pair[1] - pair[0]).collect();
            (sorted.len() < slots.len() || gaps.len() > 1).then(|| format!("schedules: the slots of {name} are {slots:?}"))
        };
        schedules.into_iter().filter_map(wrong).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bson::{DateTime, doc, oid::ObjectId};
    use recruiter_common::limits::{Limit, Rate};

    use super::*;
    use crate::oracle::Policy;

    /// Jobs that ran in these spans, with these further fields.
    fn ran(jobs: &[(i64, i64, Document)]) -> (Vec<JobId>, HashMap<JobId, Document>, Vec<Line>) {
        let (mut ids, mut documents, mut ledger) = (Vec::new(), HashMap::new(), Vec::new());
        for (begin, end, fields) in jobs {
            let (id, start) = (JobId::new(), ObjectId::new());
            let (started, ended) = (DateTime::from_millis(*begin), DateTime::from_millis(*end + CLOCK));
            let execution = doc! { "start": start, "started_at": started, "ended_at": ended };
            let mut job = doc! { "_id": id, "done": true, "last_execution": execution };
            job.extend(fields.clone());
            let line = |event, at_ms| Line { job: id.to_string(), start: start.to_hex(), attempt: 1, worker: 1, event, at_ms };
            ledger.extend([line(Event::Begin, *begin), line(Event::Done, *end)]);
            ids.push(id);
            documents.insert(id, job);
        }
        (ids, documents, ledger)
    }

    fn found(jobs: &[(i64, i64, Document)]) -> Vec<String> {
        let (ids, documents, ledger) = ran(jobs);
        let asked = Asked::default();
        for id in ids {
            asked.will_send(id, Policy::Never);
            asked.was_acknowledged(id);
        }
        let rate = Rate::new(1, Duration::from_secs(1), 1).unwrap();
        let limits = [("printer", Limit::capacity(1)), ("api", Limit::rate(rate))];
        let limits = limits.map(|(name, limit)| (name.to_owned(), limit)).into();
        Finished::new(&documents, &ledger, 0).violations(&Settings { limits, ..Settings::default() }, &asked)
    }

    #[test]
    fn executions_beyond_a_capacity_are_found() {
        let gate = doc! { "gate": "printer" };
        assert!(found(&[(0, 10, gate.clone()), (10, 20, gate.clone()), (20, 20, gate.clone())]).is_empty());
        assert_eq!(found(&[(0, 10, gate.clone()), (9, 20, gate)]).len(), 1);
    }

    #[test]
    fn an_execution_whose_worker_died_ends_with_its_death() {
        let gate = doc! { "gate": "printer" };
        let (ids, mut documents, ledger) = ran(&[(0, 500, gate.clone()), (200, 300, gate)]);
        let settings = Settings { limits: [("printer".into(), Limit::capacity(1))].into(), ..Settings::default() };
        let dead = documents.get_mut(&ids[0]).unwrap().get_document_mut("last_execution").unwrap();
        dead.extend(doc! { "crashed": true, "ended_at": DateTime::from_millis(200) });
        assert!(Finished::new(&documents, &ledger, 0).violations(&settings, &Asked::default()).is_empty());
        documents.get_mut(&ids[0]).unwrap().get_document_mut("last_execution").unwrap().insert("ended_at", DateTime::from_millis(400));
        assert_eq!(Finished::new(&documents, &ledger, 0).violations(&settings, &Asked::default()).len(), 1);
    }

    #[test]
    fn starts_beyond_a_rate_are_found() {
        let gate = doc! { "gate": "api" };
        assert!(found(&[(0, 1, gate.clone()), (1_000, 1_001, gate.clone()), (2_000, 2_001, gate.clone())]).is_empty());
        assert_eq!(found(&[(0, 1, gate.clone()), (100, 101, gate)]).len(), 1);
    }

    #[test]
    fn jobs_that_leave_their_place_in_a_line_are_found() {
        let gate = doc! { "gate": ">order" };
        assert!(found(&[(0, 10, gate.clone()), (10, 20, gate.clone())]).is_empty());
        assert_eq!(found(&[(20, 30, gate.clone()), (10, 20, gate.clone())]).len(), 1);
        assert_eq!(found(&[(0, 15, gate.clone()), (10, 20, gate)]).len(), 2, "order and capacity");
    }

    #[test]
    fn jobs_that_run_before_their_parents_are_found() {
        let child = |parent: JobId, when: &str| doc! { "waits_for": [{ "job": parent, "when": when }] };
        let check = |parent_done: bool, begin: i64, when: &str| {
            let (ids, mut documents, mut ledger) = ran(&[(0, 10, doc! { "done": parent_done })]);
            let (_, more, lines) = ran(&[(begin, 20, child(ids[0], when))]);
            documents.extend(more);
            ledger.extend(lines);
            Finished::new(&documents, &ledger, 0).violations(&Settings::default(), &Asked::default()).len()
        };
        assert_eq!([check(true, 10, "done"), check(false, 10, "failed"), check(false, 10, "ended")], [0, 0, 0]);
        assert_eq!([check(true, 5, "done"), check(false, 10, "done"), check(true, 10, "failed")], [1, 1, 1]);
        assert_eq!(found(&[(0, 1, doc! { "waits_for": [JobId::new()] })]).len(), 1, "a parent that is nowhere");
    }

    #[test]
    fn missed_and_doubled_slots_are_found() {
        let slot = |ms: i64| (ms, ms + 1, doc! { "schedule": { "name": "s", "slot": DateTime::from_millis(ms) } });
        assert!(found(&[slot(1_000), slot(2_000), slot(3_000)]).is_empty());
        assert_eq!(found(&[slot(1_000), slot(2_000), slot(4_000)]).len(), 1);
        assert_eq!(found(&[slot(1_000), slot(2_000), slot(2_000)]).len(), 1);
    }
}
