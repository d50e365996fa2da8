//! The feature `opentelemetry` of the libraries: a job and its enqueuer are spans of one trace.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

use std::{fs, sync::LazyLock, time::Duration};

use bson::{Document, doc};
use futures_util::TryStreamExt as _;
use opentelemetry::{
    Context as Trace,
    trace::{SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TracerProvider as _},
};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use recruiter_common::{
    NewJob,
    store::{REDACTED, RedactionRule},
    traces::remote,
};
use recruiter_testing::run_inline;
use recruiter_tests::{
    factory::minimal_job,
    local::{Local, prepared, store},
    mongo::TestDatabase,
    wait::{SOON, wait_for},
    workable,
};
use recruiter_worker::{BlockingExecutable, Context, Executable, NotDone, Ran, Workable, Worker, stock};
use serde::{Deserialize, Serialize};
use tracing::{Instrument as _, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::layer::SubscriberExt as _;

/// The spans of all tests of this process that have ended.
static ENDED: LazyLock<InMemorySpanExporter> = LazyLock::new(|| {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer)).unwrap();
    exporter
});

/// A span of the test, as an application has one around a request.
fn request() -> (tracing::Span, SpanContext) {
    LazyLock::force(&ENDED);
    let span = info_span!("request");
    let context = span.context().span().span_context().clone();
    (span, context)
}

fn attribute(span: &SpanData, key: &str) -> Option<String> {
    span.attributes.iter().find(|pair| pair.key.as_str() == key).map(|pair| pair.value.to_string())
}

/// The spans of the executions of this class that belong to this trace.
fn executions(within: &SpanContext, class: &str) -> Vec<SpanData> {
    let is_one =
        |span: &SpanData| span.span_context.trace_id() == within.trace_id() && attribute(span, "job.class").as_deref() == Some(class);
    ENDED.get_finished_spans().unwrap().into_iter().filter(is_one).collect()
}

/// The span of the execution of a job, once it has ended.
async fn span_of(job: &Document) -> SpanData {
    let id = job.get_object_id("_id").unwrap().to_string();
    let is_one = |span: &SpanData| attribute(span, "messaging.message.id").as_ref() == Some(&id);
    wait_for(SOON, "the span has ended", async || ENDED.get_finished_spans().unwrap().into_iter().find(is_one)).await
}

fn traceparent(span: &SpanContext) -> String {
    format!("00-{}-{}-01", span.trace_id(), span.span_id())
}

#[derive(Clone, Serialize, Deserialize)]
enum Order {
    Succeed,
    Fail,
    Panic,
    Snooze,
    Enqueue,
    Continue,
}

#[derive(Clone, Serialize, Deserialize)]
struct Obey {
    order: Order,
}

fn obey(order: Order) -> NewJob {
    Obey { order }.as_job()
}

impl Workable for Obey {
    const CLASS: &'static str = "Obey";
    /// The trace and the span of the workable.
    type Output = String;
}

impl Executable for Obey {
    type State = ();

    async fn execute(&self, _state: &(), job: &Context) -> Result<String, NotDone> {
        tokio::task::yield_now().await;
        match self.order {
            Order::Succeed => {}
            Order::Fail => return Err(NotDone::failed("SmtpDown", "no answer")),
            Order::Panic => panic!("a panic that this test wants"),
            Order::Snooze => return Err(NotDone::snooze(Duration::from_secs(60), "Early", "too early")),
            Order::Enqueue => drop(Block {}.as_job().enqueue(job.client()).await?),
            Order::Continue => return Err(NotDone::continue_as([obey(Order::Succeed)])),
        }
        Ok(recruiter_common::traces::current().unwrap_or_default())
    }
}

#[derive(Clone, Serialize, Deserialize)]
struct Block {}
workable!(Block -> String);

impl BlockingExecutable for Block {
    type State = ();

    fn execute(&self, _state: &(), _job: &Context) -> Result<String, NotDone> {
        Ok(recruiter_common::traces::current().unwrap_or_default())
    }
}

fn worker() -> Worker {
    Worker::new().register::<Obey>(()).unwrap().register_blocking::<Block>(()).unwrap()
}

/// The archived jobs, once there are so many, in the order in which they were enqueued.
async fn archived(database: &TestDatabase, jobs: usize) -> Vec<Document> {
    let find = async || -> Vec<Document> {
        database.raw("archived").find(doc! {}).sort(doc! { "_id": 1 }).await.unwrap().try_collect().await.unwrap()
    };
    wait_for(SOON, "all jobs are archived", async || Some(find().await).filter(|found| found.len() == jobs)).await
}

/// From a request to a job, and from its workable to the job that this one enqueues, which blocks a thread.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_a_child_of_the_span_that_has_enqueued_it() {
    let database = TestDatabase::new().await;
    let (_recruiter, _worker) = (Local::recruiter(&database, &[]), Local::worker(&database, worker(), &[]));
    let (span, request) = request();
    let store = store(&database).await;
    let id = obey(Order::Enqueue).enqueue(&store).instrument(span).await.unwrap().id;
    let jobs = archived(&database, 2).await;

    let first = span_of(&jobs[0]).await;
    assert_eq!((first.span_context.trace_id(), first.parent_span_id), (request.trace_id(), request.span_id()));
    assert!(first.parent_span_is_remote && first.span_kind == SpanKind::Consumer, "{first:?}");
    assert_eq!((first.name.as_ref(), &first.status), ("process generic", &Status::Unset));
    for (key, value) in [
        ("messaging.system", "recruiter"),
        ("messaging.operation.name", "process"),
        ("messaging.operation.type", "process"),
        ("messaging.destination.name", "generic"),
        ("job.id", &id.to_string()),
        ("job.attempt", "1"),
    ] {
        assert_eq!(attribute(&first, key).as_deref(), Some(value), "{key}");
    }
    let second = span_of(&jobs[1]).await;
    assert_eq!((second.span_context.trace_id(), second.parent_span_id), (request.trace_id(), first.span_context.span_id()));
    let seen: Vec<&str> = jobs.iter().map(|job| job.get_str("result").unwrap()).collect();
    assert_eq!(seen, [traceparent(&first.span_context), traceparent(&second.span_context)], "what the workables see");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_is_one_span_which_has_failed_if_an_item_has() {
    let database = TestDatabase::new().await;
    let (_recruiter, _worker) = (Local::recruiter(&database, &[]), Local::worker(&database, worker(), &[]));
    let (span, request) = request();
    let bundle = NewJob::bundle([Obey { order: Order::Succeed }, Obey { order: Order::Fail }]);
    let store = store(&database).await;
    bundle.enqueue(&store).instrument(span).await.unwrap();
    let job = archived(&database, 1).await.remove(0);
    let span = span_of(&job).await;
    assert_eq!((span.span_context.trace_id(), span.parent_span_id), (request.trace_id(), request.span_id()));
    assert!(matches!(&span.status, Status::Error { description } if description.contains("1 of 2 items failed")), "{:?}", span.status);
    assert!(format!("{job}").contains(&traceparent(&span.span_context)), "the items are executed within the span: {job}");
}

/// Written by mongosh or an older release: the worker decides.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_a_valid_trace_is_the_root_of_a_new_one() {
    LazyLock::force(&ENDED);
    let (database, _creates_the_collections) = prepared().await;
    let (_recruiter, _worker) = (Local::recruiter(&database, &[]), Local::worker(&database, worker(), &[]));
    let mut jobs = Vec::new();
    for trace in [None, Some("no trace"), Some("00-00000000000000000000000000000000-0000000000000000-01")] {
        let mut job = minimal_job("Block");
        job.extend(trace.map(|trace| ("traceparent".to_owned(), trace.into())));
        jobs.push(job);
    }
    database.raw("scheduled").insert_many(&jobs).await.unwrap();
    archived(&database, jobs.len()).await;
    for job in jobs {
        let span = span_of(&job).await;
        assert_eq!((span.parent_span_id, span.span_context.is_valid()), (SpanId::INVALID, true), "{job}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_message_of_a_redacted_class_is_not_exported() {
    let (database, store) = prepared().await;
    store.set_redaction(&RedactionRule::new("Obey", []).unwrap()).await.unwrap();
    let (_recruiter, _worker) = (Local::recruiter(&database, &[]), Local::worker(&database, worker(), &[]));
    let (span, request) = request();
    obey(Order::Fail).enqueue(&store).instrument(span).await.unwrap();
    let failed = archived(&database, 1).await;
    let exported = span_of(&failed[0]).await;
    assert_eq!(exported.span_context.trace_id(), request.trace_id());
    assert_eq!((attribute(&exported, "error.type").as_deref(), &exported.status), (Some("SmtpDown"), &Status::error(REDACTED)));
}

#[tokio::test]
async fn a_failure_is_an_error_and_a_snooze_is_none() {
    let worker = worker();
    for (order, class, description) in [
        (Order::Succeed, None, ""),
        (Order::Snooze, None, ""),
        (Order::Continue, None, ""),
        (Order::Fail, Some("SmtpDown"), "no answer"),
        (Order::Panic, Some("panic"), "it panicked: a panic that this test wants"),
    ] {
        let (span, request) = request();
        run_inline(&worker, obey(order)).instrument(span).await.unwrap();
        let execution = executions(&request, "Obey").remove(0);
        let status = class.map_or(Status::Unset, |_| Status::error(description));
        assert_eq!((attribute(&execution, "error.type").as_deref(), &execution.status), (class, &status));
    }
}

#[tokio::test]
async fn the_jobs_that_a_job_becomes_are_children_of_its_execution() {
    let (span, request) = request();
    let ran = run_inline(&worker(), obey(Order::Continue)).instrument(span).await.unwrap();
    let execution = executions(&request, "Obey").remove(0).span_context;
    let Ran::Became { jobs } = ran else { panic!("{ran:?}") };
    assert_eq!(jobs[0].get_str("traceparent").unwrap(), traceparent(&execution));
}

/// What the program enqueues, or reports to OpenTelemetry, is a child of its execution.
#[tokio::test]
async fn a_program_gets_the_span_of_its_execution() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("workables.toml");
    fs::write(&file, "[workables.trace]\ncommand = [\"printenv\", \"TRACEPARENT\"]\n").unwrap();
    let worker = Worker::new().register_programs(stock::load(&file).unwrap()).unwrap();
    let (span, request) = request();
    let ran = run_inline(&worker, NewJob::of_class("trace", doc! {})).instrument(span).await.unwrap();
    let execution = executions(&request, "trace").remove(0);
    assert_eq!(execution.parent_span_id, request.span_id());
    assert_eq!(ran.result::<String>(), Some(traceparent(&execution.span_context)), "{ran:?}");
}

/// A trace that the application has set stays, and a job can take one before it is enqueued.
#[tokio::test]
async fn the_trace_of_a_job_can_be_set() {
    let document = |job: NewJob| job.to_job(bson::DateTime::now().to_chrono()).unwrap().settings.traceparent;
    let (span, request) = request();
    let own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
    assert_eq!(span.in_scope(|| document(obey(Order::Fail).traceparent(own))), Some(own.into()));
    assert_eq!(span.in_scope(|| document(obey(Order::Fail).traceparent(own).traced())), Some(own.into()));
    assert_eq!(document(span.in_scope(|| obey(Order::Fail).traced())), Some(traceparent(&request)));
    assert_eq!(document(obey(Order::Fail)), None);
    // Without `tracing`, as a library of OpenTelemetry sets it.
    let _attached = remote(own).unwrap().attach();
    assert_eq!(document(obey(Order::Fail)), Some(own.into()));
    let _empty = Trace::new().attach();
    assert_eq!(document(obey(Order::Fail)), None);
}
