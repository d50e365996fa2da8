//! A web service that takes orders and enqueues their invoices, each pair in one transaction on the service's own client.
//!
//! ```sh
//! MONGODB_URI='mongodb://127.0.0.1:27017/shop?replicaSet=rs0' cargo run -p recruiter-worker --example web_service
//! curl -X POST localhost:8080/orders/17 -H 'content-type: application/json' -d '{"cents": 1999}'
//! curl localhost:8080/orders/17/invoice
//! ```

mod shop;

use std::{env, error::Error, io::Write as _};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    routing::{get, post},
};
use recruiter_worker::{
    Client, JobId, Workable,
    bson::{Document, doc},
    mongodb::{self, ClientSession, Collection},
};
use serde::Deserialize;
use shop::{CountPrimes, SendInvoice};

#[derive(Clone)]
struct Shop {
    orders: Collection<Document>,
    jobs: Client,
}

#[derive(Deserialize)]
struct Order {
    cents: i64,
}

impl Shop {
    async fn open(uri: &str) -> Result<Self, Box<dyn Error>> {
        let client = mongodb::Client::with_uri_str(uri).await?;
        let database = client.default_database().ok_or("the URI names no database")?;
        let jobs = Client::from_database(database.clone());
        // Once, where the application sets up its own collections too.
        jobs.ensure_schema().await?;
        #[expect(clippy::disallowed_methods, reason = "a collection of the application's own")]
        let orders = database.collection("orders");
        Ok(Self { orders, jobs })
    }

    /// The order and the job of its invoice: both are there, or neither.
    async fn order(&self, number: &str, cents: i64) -> Result<JobId, Box<dyn Error>> {
        let invoice = SendInvoice { order: number.into(), cents }.as_job().urn(number);
        let (orders, jobs, number) = (self.orders.clone(), self.jobs.clone(), number.to_owned());
        let mut session = self.jobs.start_session().await?;
        // Runs it again when MongoDB asks for that, after a conflict or in a failover.
        let take = async move |session: &mut ClientSession| {
            let enqueued = invoice.clone().enqueue_in(&jobs, session).await?;
            orders.insert_one(doc! { "_id": &number, "cents": cents, "invoice": enqueued.id }).session(session).await?;
            Ok(enqueued.id)
        };
        let id = session.start_transaction().and_run2(take).await?;
        self.jobs.announce_jobs(["mail"]).await;
        Ok(id)
    }

    /// The invoice of an order, once it has one.
    async fn invoice(&self, number: &str) -> Result<Option<String>, Box<dyn Error>> {
        let Some(order) = self.orders.find_one(doc! { "_id": number }).await? else { return Ok(None) };
        Ok(self.jobs.result_of::<SendInvoice>(order.get_object_id("invoice")?.into()).await?.done())
    }
}

/// The response of a handler after an error.
fn failed(error: impl ToString) -> (StatusCode, String) {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

async fn order(shop: State<Shop>, number: Path<String>, order: Json<Order>) -> Result<(StatusCode, String), (StatusCode, String)> {
    let id = shop.order(&number, order.cents).await.map_err(failed)?;
    Ok((StatusCode::ACCEPTED, id.to_string()))
}

async fn invoice(shop: State<Shop>, number: Path<String>) -> Result<String, (StatusCode, String)> {
    let invoice = shop.invoice(&number).await.map_err(failed)?;
    invoice.ok_or((StatusCode::NOT_FOUND, format!("order {} has no invoice yet", *number)))
}

/// Not part of any transaction.
async fn primes(shop: State<Shop>, below: Path<u32>) -> Result<(StatusCode, String), (StatusCode, String)> {
    let enqueued = CountPrimes { below: *below }.as_job().enqueue(&shop.jobs).await.map_err(failed)?;
    Ok((StatusCode::ACCEPTED, enqueued.id.to_string()))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let shop = Shop::open(&env::var("MONGODB_URI")?).await?;
    let service = Router::new()
        .route("/orders/{number}", post(order))
        .route("/orders/{number}/invoice", get(invoice))
        .route("/primes/{below}", post(primes))
        .with_state(shop);
    let listener = tokio::net::TcpListener::bind(env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".into())).await?;
    writeln!(std::io::stdout(), "listening on {}", listener.local_addr()?)?;
    axum::serve(listener, service).await?;
    Ok(())
}
