//! Transactions in which workables end their own jobs: the effects happen once for each job that is done, also if processes die.

use std::time::Duration;

use bson::{Document, doc};
use mongodb::Collection;
use recruiter_common::{JobResult, NewJob, Workable, WorkerId, shutdown::pause};
use recruiter_tests::{
    effects::{Tally, Trial, endure},
    fail_points::FailPoint,
    local::{self, Local, prepared},
    oracle::number,
    promise,
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{CheckpointError, Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};

/// The short form of `tests/soak --kills`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_happen_once_for_each_job_whatever_is_killed() {
    let seed = rand::random();
    println!("seed {seed}");
    let outcome = endure(Trial { seed, blows: 20, freezes: false }, |line| println!("{line}")).await;
    println!("{outcome}");
    assert_eq!(outcome.findings.all(), Vec::<String>::new());
    let Tally { blows, jobs, once, lost, doubled } = outcome.tally;
    promise!((once, lost, doubled) == (jobs, 0, 0), "effects of {jobs} jobs: {once} once, {lost} lost, {doubled} doubled");
    assert_eq!(blows, 20);
}

#[expect(clippy::disallowed_methods, reason = "a collection of the application")]
fn collection(job: &Context, name: &str) -> Collection<Document> {
    job.client().database().collection(name)
}

/// Does in a transaction what its script says.
#[derive(Serialize, Deserialize)]
struct Note {
    script: String,
}
workable!(Note -> String);

impl Executable for Note {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<String, NotDone> {
        let [notes, conflicts, scheduled] = &["notes", "conflicts", "scheduled"].map(|name| collection(job, name));
        let result = job
            .transaction(|mut session| async move {
                notes.insert_one(doc! { "job": job.job_id() }).session(&mut *session).await?;
                match self.script.as_str() {
                    "fail" => return Err(NotDone::failed("Broken", "as told").into()),
                    "error" => Err("a text")?,
                    "conflict" => {
                        // Another writer is faster, once.
                        let done = conflicts.count_documents(doc! {}).await?;
                        if done == 0 {
                            conflicts.insert_one(doc! { "_id": 1 }).await?;
                        }
                        conflicts.update_one(doc! { "_id": 1 }, doc! { "$inc": { "n": 1 } }).session(&mut *session).await?;
                    }
                    "wrapped conflict" => {
                        // The same, and the error's type is lost on its way.
                        if conflicts.count_documents(doc! { "_id": 2 }).await? == 0 {
                            conflicts.insert_one(doc! { "_id": 2 }).await?;
                        }
                        let updated = conflicts.update_one(doc! { "_id": 2 }, doc! { "$inc": { "n": 1 } }).session(&mut *session).await;
                        updated.map_err(|error| error.to_string())?;
                    }
                    "reports" => {
                        // Each second of it would be a write to the document of the job.
                        conflicts.insert_one(doc! { "body of": job.job_id() }).await?;
                        for step in 1..=20 {
                            job.progress((step, 20));
                            job.checkpoint(step)?;
                            job.log(format!("step {step}"));
                            pause(Duration::from_millis(100)).await;
                        }
                        assert_eq!(job.save_checkpoint(21).await, Err(CheckpointError::InTransaction));
                    }
                    "commits" => session.commit_transaction().await?,
                    "dead" => {
                        // What a rescue does after the death of the worker.
                        let unlock = doc! { "$set": { "last_execution.start": WorkerId::new() } };
                        scheduled.update_one(doc! { "_id": job.job_id() }, unlock).await?;
                    }
                    _ => {}
                }
                Ok(self.script.clone())
            })
            .await?;
        match self.script.as_str() {
            "fail afterwards" => Err(NotDone::failed("Broken", "afterwards")),
            "panic afterwards" => panic!("afterwards"),
            "twice" => job.transaction(|_session| async move { Ok("twice".to_owned()) }).await,
            _ => Ok(result),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_is_all_or_nothing_and_the_job_ends_with_it() {
    let (database, store) = prepared().await;
    database.raw("notes").insert_one(doc! { "job": "none" }).await.unwrap();
    let processes = Local::pair(&database, &[], Worker::new().register::<Note>(()).unwrap(), &[]);
    let run = async |script: &str| {
        let id = Note { script: script.into() }.as_job().enqueue(&store).await.unwrap().id;
        let ended = async || !matches!(store.result_of::<Note>(id).await.unwrap(), JobResult::Unfinished);
        wait_until(SOON, "the job has ended", ended).await;
        let result = store.result_of::<Note>(id).await.unwrap();
        let end = if let JobResult::Failed { failure: Some(failure), .. } = &result {
            format!("{} {}", failure.class, failure.message)
        } else {
            format!("done {}", result.done().unwrap())
        };
        (end, database.count("notes", doc! { "job": id }).await)
    };
    assert_eq!(run("plain").await, ("done plain".into(), 1));
    assert_eq!(run("fail").await, ("Broken as told".into(), 0));
    assert_eq!(run("error").await, ("error a text".into(), 0));
    assert_eq!(run("fail afterwards").await, ("done fail afterwards".into(), 1), "the commit was its end");
    assert_eq!(run("panic afterwards").await, ("done panic afterwards".into(), 1));
    assert_eq!(run("twice").await, ("done twice".into(), 1));
    assert_eq!(run("conflict").await, ("done conflict".into(), 1), "it is repeated");
    assert_eq!(run("wrapped conflict").await, ("done wrapped conflict".into(), 1), "it is repeated as well");
    // A cleaner ends the sessions of a worker that it believes dead: a commit is interrupted, before or after it has happened.
    let commit = || FailPoint::new("recruiter-worker", &["commitTransaction"]).times(1);
    for interrupted in [commit().error_code(11_601), commit().write_concern_error(11_601)] {
        let fault = interrupted.arm(database.uri()).await;
        assert_eq!(run("plain").await, ("done plain".into(), 1), "the commit is sent again");
        assert_eq!(fault.struck().await, 1);
    }
    assert_eq!(run("reports").await, ("done reports".into(), 1));
    let bodies = database.count("conflicts", doc! { "body of": { "$exists": true } }).await;
    assert_eq!(bodies, 1, "it commits at the first attempt");
    let reported = database.raw("archived").find_one(doc! { "result": "reports" }).await.unwrap().unwrap();
    assert_eq!(number(reported.get_document("progress").unwrap(), "done"), 20);
    assert_eq!((reported.get_array("log").unwrap().len(), reported.get("checkpoint")), (20, None));
    assert!(run("commits").await.0.starts_with("transaction the body has ended the transaction itself"));

    let id = Note { script: "dead".into() }.as_job().enqueue(&store).await.unwrap().id;
    database.until("scheduled", doc! { "_id": id, "locked": true, "attempts": 1 }, 1, "the claim is lost").await;

    let items = NewJob::bundle([Note { script: "plain".into() }]).enqueue(&store).await.unwrap().id;
    let archived = async || database.raw("archived").find_one(doc! { "_id": items }).await.unwrap();
    wait_until(SOON, "the bundle has ended", async || archived().await.is_some()).await;
    let outcomes = archived().await.unwrap().get_array("item_outcomes").unwrap().clone();
    assert_eq!(outcomes[0].as_document().unwrap().get_str("class").unwrap(), "transaction", "an item has no transaction of its own");
    // That was later.
    promise!(database.count("notes", doc! { "job": id }).await == 0, "a zombie has no effect");
    assert_eq!(database.count("archived", doc! { "_id": id }).await, 0);
    local::stop(processes).await;
}
