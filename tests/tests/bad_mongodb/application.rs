//! An application's own transactions, on its own client, while the primary is lost again and again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{Document, doc};
use mongodb::{
    Client, Collection,
    error::{Error, UNKNOWN_TRANSACTION_COMMIT_RESULT},
};
use recruiter_common::{EnqueueError, GraphId, NewJob, StoreError, control::Change, shutdown::pause, store::Store};
use recruiter_tests::{
    full_length,
    replica_set::ReplicaSet,
    wait::{SOON, wait_until},
};

use tokio::task::JoinSet;

use crate::server::SETS;

struct Shop {
    client: Client,
    orders: Collection<Document>,
    store: Store,
}

impl Shop {
    /// One order and the job of its invoice in one transaction, until it is committed; as MongoDB's manual says.
    async fn order(&self, number: i32) {
        let mut session = self.client.start_session().await.unwrap();
        while let Err(error) = self.try_to_order(&mut session, number).await {
            assert!(matches!(&error, EnqueueError::Store(failed) if failed.is_transient()), "order {number}: {error:?}");
            let _ = session.abort_transaction().await;
        }
    }

    async fn try_to_order(&self, session: &mut mongodb::ClientSession, number: i32) -> Result<(), EnqueueError> {
        let driver = |source: Error| StoreError::Mongo { operation: "the shop's own", source: source.into() };
        session.start_transaction().await.map_err(driver)?;
        self.orders.insert_one(doc! { "_id": number }).session(&mut *session).await.map_err(driver)?;
        NewJob::of_class("SendInvoice", doc! { "order": number }).enqueue_in(&self.store, session).await?;
        loop {
            match session.commit_transaction().await {
                Err(error) if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) => {}
                other => return Ok(other.map_err(driver)?),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_order_of_an_application_has_its_job_whatever_becomes_of_the_primary() {
    let _turn = SETS.acquire().await.unwrap();
    let set = ReplicaSet::start(3).await;
    let client = Client::with_uri_str(set.uri_for("shop")).await.unwrap();
    let database = client.database("shop");
    #[expect(clippy::disallowed_methods, reason = "a collection of the application's own, and a look beneath the operations")]
    let (orders, jobs) = (database.collection("orders"), database.collection::<Document>("scheduled"));
    let shop = Arc::new(Shop { client, orders, store: recruiter_common::Client::from_database(database).into() });
    shop.store.ensure_schema().await.unwrap();
    shop.orders.insert_one(doc! { "_id": 0 }).await.unwrap();
    let closed = Arc::new(AtomicBool::new(false));
    let (open_shop, closing) = (shop.clone(), closed.clone());
    let orders = tokio::spawn(async move {
        let mut number = 0;
        while !closing.load(Ordering::Relaxed) {
            number += 1;
            open_shop.order(number).await;
        }
        number
    });
    let graph = GraphId::new();
    let waited = NewJob::of_class("Report", doc! {}).in_graph(graph).enqueue(&shop.store).await.unwrap().id;
    let waiting = shop.clone();
    let wait = tokio::spawn(async move { waiting.store.wait_for_end(waited, Duration::from_secs(3_600)).await });
    // Each wait for a graph begins with a read, so they begin throughout.
    let (waiting, closing) = (shop.clone(), closed.clone());
    let graph_waits = tokio::spawn(async move {
        let mut waits = JoinSet::new();
        while !closing.load(Ordering::Relaxed) {
            let waiting = waiting.clone();
            waits.spawn(async move { waiting.store.wait_for_graph(graph, Duration::from_secs(3_600)).await });
            pause(Duration::from_millis(100)).await;
        }
        waits.join_all().await
    });
    let failovers = if full_length() { 3 } else { 2 };
    for _ in 0..failovers {
        let before = jobs.estimated_document_count().await.unwrap_or(0);
        wait_until(SOON, "orders come in", async || jobs.estimated_document_count().await.is_ok_and(|now| now > before)).await;
        set.step_down().await;
        set.whole().await;
    }
    assert!(!wait.is_finished(), "a wait goes on through failovers");
    shop.store.control(false).change(&Change::Cancel, &[waited]).await.unwrap();
    assert!(wait.await.unwrap().unwrap().is_archived);
    closed.store(true, Ordering::Relaxed);
    for waited_for in graph_waits.await.unwrap() {
        assert!(waited_for.unwrap().iter().all(|job| job.id == waited && !job.is_open()));
    }
    let taken = orders.await.unwrap();
    assert!(taken > failovers, "{taken}");
    let numbers = |field: &'static str| {
        let found = if field == "_id" { shop.orders.distinct(field, doc! { "_id": { "$gt": 0 } }) } else { jobs.distinct(field, doc! {}) };
        async move { found.await.unwrap().into_iter().map(|number| number.as_i32().unwrap()).collect::<Vec<_>>() }
    };
    let all: Vec<i32> = (1..=taken).collect();
    assert_eq!(numbers("_id").await, all);
    assert_eq!(numbers("workable.parameters.order").await, all);
    assert_eq!(jobs.count_documents(doc! {}).await.unwrap(), u64::try_from(taken).unwrap(), "one job each");
}
