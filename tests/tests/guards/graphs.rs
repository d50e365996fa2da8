//! Jobs that wait for others.

use std::collections::BTreeMap;

use bson::{RawDocumentBuf, doc};
use recruiter_common::{
    Failure, FinishReason, Graph, JobId, Keep, NewJob, WorkerId,
    ids::StartId,
    instant::Instant,
    store::{Archival, CommitSession, Recorded},
};

use crate::setting::{Setting, set_of};

impl Setting {
    /// A job, two that wait for it, and the same two of which one is locked by hand.
    async fn waiting(&self) -> [JobId; 3] {
        let mut graph = Graph::new();
        let parent = graph.add(NewJob::of_class("x", doc! {}));
        let children = graph.group((0..2).map(|_| NewJob::of_class("x", doc! {}).waits_for(parent)));
        graph.enqueue(&self.store).await.unwrap();
        [parent, children[0], children[1]]
    }

    /// Locks a job by hand.
    async fn lock(&self, job: JobId) {
        let execution = doc! { "worker": WorkerId::new(), "start": StartId::new() };
        let locked = doc! { "$set": { "locked": true, "last_execution": execution } };
        self.database.raw("scheduled").update_one(doc! { "_id": job }, locked).await.unwrap();
    }

    async fn field(&self, job: JobId, field: &str) -> Option<bson::Bson> {
        self.database.raw("scheduled").find_one(doc! { "_id": job }).await.unwrap().unwrap().remove(field)
    }
}

#[tokio::test]
async fn only_jobs_that_wait_are_listed_and_read() {
    let s = Setting::new().await;
    let [parent, one, other] = s.waiting().await;
    assert_eq!(set_of(s.store.waiting_jobs().await.unwrap()), set_of([one, other]));
    let (waiting, invalid) = s.store.waiting_among(&[parent, one]).await.unwrap();
    assert_eq!((set_of(waiting.iter().map(|job| job.id)), invalid), (set_of([one]), vec![]));
    let documents = s.store.waiting_documents(&[parent, one]).await.unwrap();
    assert_eq!(set_of(documents.into_iter().map(|(job, _)| job)), set_of([one]), "not one that was not asked for");
    s.lock(other).await;
    let documents = s.store.waiting_documents(&[parent, one, other]).await.unwrap();
    assert_eq!(set_of(documents.into_iter().map(|(job, _)| job)), set_of([one]), "not one that runs");
}

#[tokio::test]
async fn only_the_named_jobs_that_wait_are_released() {
    let s = Setting::new().await;
    let ([parent, one, other], [_, locked, _]) = (s.waiting().await, s.waiting().await);
    s.lock(locked).await;
    let before = s.field(parent, "scheduled_at").await;
    let at = Instant::from_timestamp_millis(1_000).unwrap();
    assert_eq!(s.store.release_if_waiting(&[(at, vec![parent, one, locked])]).await.unwrap(), 1);
    assert_eq!(s.field(parent, "scheduled_at").await, before, "it does not wait");
    assert_eq!(
        (s.field(one, "scheduled_at").await, s.field(one, "waiting").await),
        (Some(bson::DateTime::from_millis(1_000).into()), None)
    );
    assert_eq!(s.field(other, "waiting").await, Some(true.into()), "it was not named");
    assert_eq!(s.field(locked, "waiting").await, Some(true.into()), "it is left to its holder");
}

#[tokio::test]
async fn a_job_that_runs_is_not_marked_as_followed_and_a_graph_has_its_own_jobs() {
    let s = Setting::new().await;
    let [idle, runs, alone] = s.jobs().await;
    s.lock(runs).await;
    let mut graph = Graph::new();
    let child = graph.add(NewJob::of_class("x", doc! {}).waits_for(idle).waits_for(runs));
    let id = graph.id();
    graph.enqueue(&s.store).await.unwrap();
    assert_eq!((s.field(idle, "followed").await, s.field(runs, "followed").await), (Some(true.into()), None));
    assert_eq!(s.field(alone, "followed").await, None);
    let fleeting = NewJob::of_class("x", doc! {}).keep(Keep::Failures).enqueue(&s.store).await.unwrap().id;
    assert!(NewJob::of_class("x", doc! {}).waits_for(fleeting).enqueue(&s.store).await.is_err(), "nothing would be left of it");
    assert_eq!(s.field(fleeting, "followed").await, None);
    s.waiting().await;
    assert_eq!(s.store.graph(id).await.unwrap().iter().map(|job| job.id).collect::<Vec<_>>(), [child]);
}

#[tokio::test]
async fn the_ends_and_results_of_the_named_jobs_are_read() {
    let s = Setting::new().await;
    let [one, other] = [JobId::new(), JobId::new()];
    let archived = |job| doc! { "_id": job, "why": "done", "result": 7 };
    s.database.raw("archived").insert_many([archived(one), archived(other)]).await.unwrap();
    assert_eq!(s.store.ends_of(&[one]).await.unwrap().into_keys().collect::<Vec<_>>(), [one]);
    assert_eq!(s.store.gone_among(&[one, JobId::new()]).await.unwrap().len(), 1);
}

/// Other jobs, finished or fleeting, do not matter to a graph.
#[tokio::test]
async fn a_graph_is_refused_for_its_own_jobs_only() {
    let s = Setting::new().await;
    let [parent] = s.jobs().await;
    s.database.raw("archived").insert_one(doc! { "_id": JobId::new(), "why": "done" }).await.unwrap();
    let fleeting = |class: &str| NewJob::of_class(class, doc! {}).keep(Keep::Failures);
    let alone = fleeting("x").enqueue(&s.store).await.unwrap().id;
    let mut graph = Graph::new();
    let first = graph.add(fleeting("x"));
    graph.add(NewJob::of_class("x", doc! {}).waits_for(first).waits_for(parent));
    let id = graph.id();
    graph.enqueue(&s.store).await.unwrap();
    assert_eq!(s.store.graph(id).await.unwrap().len(), 2);
    let after = |parent| NewJob::of_class("x", doc! {}).waits_for(parent);
    after(first).enqueue(&s.store).await.expect("its end is announced, because another job waits for it");
    assert!(after(alone).enqueue(&s.store).await.is_err(), "its worker may not know that others wait for it");
}

#[tokio::test]
async fn a_released_job_is_not_archived_by_an_older_decision() {
    let s = Setting::new().await;
    let [_, one, other] = s.waiting().await;
    let decided: Vec<Archival> = s.store.waiting_documents(&[one, other]).await.unwrap().iter().map(cancelled).collect();
    s.store.release_if_waiting(&[(s.store.now(), vec![one])]).await.unwrap();
    // A majority must have the release, or the archival is to be repeated: it has everything before this write.
    s.database.raw("later").insert_one(doc! {}).await.unwrap();
    let recorded = s.store.archive(&mut CommitSession::default(), &decided).await.unwrap();
    let of: BTreeMap<JobId, Recorded> = decided.iter().map(Archival::job).zip(recorded).collect();
    assert_eq!((of[&one], of[&other]), (Recorded::ClaimLost, Recorded::Yes));
}

fn cancelled((job, document): &(JobId, RawDocumentBuf)) -> Archival {
    Archival::unstarted(*job, document, &FinishReason::CANCELLED, &Failure::new("parent-gone", ""), Instant::default())
}
