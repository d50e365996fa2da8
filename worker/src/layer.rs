//! Layers around the execution of jobs: code that runs before and after every workable of a worker.

use std::{fmt, future::Future, sync::Arc};

use bson::Bson;
use futures_util::{FutureExt as _, future::BoxFuture};

use crate::{
    context::Context,
    outcome::{Done, NotDone},
    registry::Ready,
};

/// Code around the execution of every job of a worker, and of every item of a bundle: asynchronous and blocking workables, and programs.
///
/// It can run code before and after, read and change the outcome, or leave the execution out. It runs within the time limit of the
/// job, in the span of the job, and a panic in it is a failure of the job. It ends before the outcome is recorded: for what must follow the
/// record, use the hooks of [`Executable`](crate::Executable) or [`Worker::listen`](crate::Worker::listen).
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use recruiter_worker::{Context, Layer, Next, NotDone, Success, Worker};
///
/// /// Counts the failures, and does not run jobs of tenants that are blocked.
/// #[derive(Default)]
/// struct Tenants {
///     failures: AtomicU64,
/// }
///
/// impl Layer for Tenants {
///     async fn around(&self, job: &Context, next: Next<'_>) -> Result<Success, NotDone> {
///         if job.tags().iter().any(|tag| tag == "tenant:blocked") {
///             return Err(NotDone::give_up("Blocked", "this tenant is blocked"));
///         }
///         let ended = next.run().await;
///         if let Err(NotDone::Failed(failure)) = &ended {
///             self.failures.fetch_add(1, Ordering::Relaxed);
///             tracing::info!(class = failure.class, "a job of a tenant failed");
///         }
///         ended
///     }
/// }
///
/// let worker = Worker::new().layer(Tenants::default());
/// ```
pub trait Layer: Send + Sync + 'static {
    /// Runs `next` (the layers inside of this one and then the workable), and what belongs before and after it. A future of `next` that is
    /// dropped before its end aborts the execution; a blocking workable then goes on in its thread, unobserved.
    ///
    /// # Errors
    /// The outcome of the execution, or another one.
    fn around(&self, job: &Context, next: Next<'_>) -> impl Future<Output = Result<Success, NotDone>> + Send;
}

/// The success of an execution, with its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Success(pub(crate) Done);

impl Success {
    /// The result that the archive keeps; `None` for `()`.
    pub fn result(&self) -> Option<&Bson> {
        self.0.result.as_ref()
    }
}

/// The rest of an execution: the layers inside of the present one, and the workable.
pub struct Next<'a> {
    layers: &'a [Arc<dyn Erased>],
    workable: &'a dyn Ready,
    job: &'a Arc<Context>,
}

impl Next<'_> {
    /// Runs it.
    ///
    /// # Errors
    /// The outcome, if it is not a success.
    pub async fn run(self) -> Result<Success, NotDone> {
        match self.layers.split_first() {
            Some((first, layers)) => first.around_erased(self.job, Next { layers, ..self }).await,
            None => self.workable.execute(self.job).await.map(Success),
        }
    }
}

impl fmt::Debug for Next<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Next").field("job", &self.job).field("layers", &self.layers.len()).finish_non_exhaustive()
    }
}

/// A layer whose type is erased.
trait Erased: Send + Sync {
    fn around_erased<'a>(&'a self, job: &'a Context, next: Next<'a>) -> BoxFuture<'a, Result<Success, NotDone>>;
}

impl<L: Layer> Erased for L {
    fn around_erased<'a>(&'a self, job: &'a Context, next: Next<'a>) -> BoxFuture<'a, Result<Success, NotDone>> {
        self.around(job, next).boxed()
    }
}

/// The layers of a worker, the outermost first. `None` if it has none.
#[derive(Clone, Default)]
pub(crate) struct Layers(Option<Arc<Vec<Arc<dyn Erased>>>>);

impl Layers {
    pub(crate) fn add(&mut self, layer: impl Layer) {
        Arc::make_mut(self.0.get_or_insert_default()).push(Arc::new(layer));
    }

    /// Executes a workable within the layers.
    pub(crate) async fn execute(&self, workable: &dyn Ready, job: &Arc<Context>) -> Result<Done, NotDone> {
        match &self.0 {
            Some(layers) => Next { layers, workable, job }.run().await.map(|success| success.0),
            None => workable.execute(job).await,
        }
    }
}
