//! `recruiter web`: an HTTP API, for programs in any language, and pages, for people.
//!
//! | file | content |
//! |---|---|
//! | `args` | the flags |
//! | `access` | who may do what: tokens and people in a file, roles, and requests that a browser makes for another page |
//! | `audit` | changes, each with its entry in the audit |
//! | `changes` | changes of jobs |
//! | `live` | events for many readers, from one subscription |
//! | `password` | passwords, as hashes |
//! | `person` | `recruiter web password`: makes one |
//! | `problem` | why a request is refused, as JSON |
//! | `requests` | the parts of a request, read with the messages of the command line |
//! | `api` | what is answered to programs |
//! | `pages` | what is answered to people |
//! | `work` | workers whose jobs clients execute |
//! | `token` | `recruiter web token`: makes a token |

mod access;
mod api;
mod args;
mod audit;
mod changes;
mod live;
mod pages;
mod password;
mod person;
mod problem;
mod requests;
mod token;
mod work;

use std::{
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant as Monotonic},
};

use anyhow::Context as _;
use axum::{Router, extract::State, middleware::from_fn_with_state};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use recruiter_common::{
    exit::Exit,
    http::{Bounds, serve},
    service::{self, Watchdog},
    shutdown::Shutdown,
    spec::Classes,
    store::{ConnectArgs, Store},
};
use tokio::{sync::Semaphore, time::timeout};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

pub use self::args::WebArgs;
use self::{
    access::{Access, Role, refuse_other_pages},
    args::WebCommand,
    live::Live,
    problem::Problem,
    work::Work,
};

/// The name in the logs of MongoDB.
const APP_NAME: &str = "recruiter web";
const BOUNDS: Bounds = Bounds {
    connections: 1_000,
    // Longer than common clients keep an idle connection: one that is closed while a client sends has an unknown outcome.
    head_within: Duration::from_secs(120),
    head_bytes: 65_536,
    one_request_within: None,
    read_within: Duration::from_secs(30),
};
/// Maximum number of streams of events and messages at a time. Other requests have the rest of the connections.
const STREAMS: usize = 500;
/// How long the defaults of classes are used, which workers declare at their start.
const CLASSES_FOR: Duration = Duration::from_secs(1);
/// How long a stop waits for requests that have begun.
const GRACE: Duration = Duration::from_secs(10);

/// What all requests share.
struct Web {
    store: Store,
    access: Access,
    work: Arc<Work>,
    /// Changes that have begun.
    tasks: TaskTracker,
    /// How many have ended.
    changed: AtomicU64,
    live: Live,
    /// The defaults that workers have declared, and when they were asked for.
    classes: Mutex<Option<(Monotonic, Arc<Classes>)>>,
    /// Streams that may be opened.
    streams: Arc<Semaphore>,
    /// Ends all streams.
    stop: CancellationToken,
    /// What a form of a page has from somebody without a session, so that no page of others can send one.
    csrf: Arc<str>,
    kept: pages::Kept,
    /// Whether a proxy with TLS is in front.
    is_behind_proxy: bool,
}

impl Web {
    fn new(store: Store, access: Access, work: Arc<Work>, is_behind_proxy: bool) -> Self {
        Self {
            store,
            access,
            work,
            tasks: TaskTracker::new(),
            changed: AtomicU64::default(),
            live: Live::default(),
            classes: Mutex::default(),
            streams: Arc::new(Semaphore::new(STREAMS)),
            stop: CancellationToken::new(),
            csrf: hex::encode(rand::random::<[u8; 32]>()).into(),
            kept: pages::Kept::default(),
            is_behind_proxy,
        }
    }
}

impl Web {
    /// How many changes have ended.
    fn changed(&self) -> u64 {
        self.changed.load(Ordering::Relaxed)
    }

    /// The defaults of classes, of [`CLASSES_FOR`] ago at most. A reading would take as long as the enqueueing itself.
    async fn classes(&self) -> Result<Arc<Classes>, Problem> {
        if let Some((_, classes)) = self.classes.lock().as_ref().filter(|(asked, _)| asked.elapsed() < CLASSES_FOR) {
            return Ok(classes.clone());
        }
        let (asked, classes) = (Monotonic::now(), Arc::new(self.store.class_defaults().await?));
        *self.classes.lock() = Some((asked, classes.clone()));
        Ok(classes)
    }
}

type Shared = State<Arc<Web>>;

/// Serves until a stop is requested.
///
/// # Errors
/// When the tokens or the address cannot be used, or MongoDB cannot at the start. Later the process waits for MongoDB.
pub async fn run(args: WebArgs, connect: &ConnectArgs, mut shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    match &args.command {
        Some(WebCommand::Token(args)) => return Ok(token::run(args, out)?),
        Some(WebCommand::Password(args)) => return person::run(args, out),
        None => {}
    }
    let access = args.access()?;
    let listener = args.listen().await?;
    let at = listener.local_addr().context("the address of the API is not known")?;
    args.check_open(at, &access)?;
    let _monitoring = args.metrics.serve("recruiter-web").await?;
    let store = tokio::select! {
        connected = connected(connect, &access) => connected?,
        () = shutdown.requested() => return Ok(()),
    };
    let work = Arc::new(Work::new(connect.clone()));
    let _looking = work.look_after();
    tracing::info!(address = %at, "serving the API at /api/v1, and pages at /");
    service::ready(&format!("serving http://{at}"));
    let web = Arc::new(Web::new(store, access, work.clone(), args.behind_proxy));
    pages::begin(&web);
    let (stop, tasks, watchdog) = (web.stop.clone(), web.tasks.clone(), Watchdog::of_this_process());
    let service = TowerToHyperService::new(router(web));
    let mut serving = AbortOnDropHandle::new(tokio::spawn(serve(listener, BOUNDS, service, stop.clone())));
    while !shutdown.is_requested() {
        watchdog.progress();
        shutdown.sleep(watchdog.next_in()).await;
    }
    service::stopping();
    // Clients may still end the jobs that they have.
    tokio::select! {
        () = work.stop() => {}
        () = shutdown.aborted() => {}
    }
    stop.cancel();
    tasks.close();
    let ended = async {
        let ended = (&mut serving).await;
        tasks.wait().await;
        ended
    };
    tokio::select! {
        ended = timeout(GRACE, ended) => match ended {
            Ok(ended) => ended.context("the server has failed"),
            Err(_) => {
                tracing::warn!("requests were still running after {} s, and are broken off", GRACE.as_secs());
                Ok(())
            }
        },
        () = shutdown.aborted() => Err(anyhow::anyhow!("stopped by a second signal").context(Exit::Aborted)),
    }
}

/// Who only shows needs no right to write.
async fn connected(connect: &ConnectArgs, access: &Access) -> Result<Store, recruiter_common::ConnectError> {
    if access.highest() == Some(Role::Viewer) {
        Store::connect_to_ask(connect, APP_NAME).await
    } else {
        Store::connect(connect, APP_NAME).await
    }
}

fn router(web: Arc<Web>) -> Router {
    let api = api::router(&web)
        .fallback(|| async { Problem::not_found("there is nothing at this path; /api/v1/openapi.json lists what there is") })
        .method_not_allowed_fallback(|| async { Problem::wrong_method() })
        .layer(from_fn_with_state(web.clone(), refuse_other_pages));
    Router::new().nest("/api/v1", api).merge(pages::router(&web)).with_state(web)
}
