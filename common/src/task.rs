//! Where a process does its work: on the threads that hear from the network.

use tokio_util::task::AbortOnDropHandle;

/// Runs a future as a task of the runtime that ends with whoever waits for it.
///
/// What `main` awaits itself runs on a thread of its own, which every answer from MongoDB wakes from another. As a task it starts a
/// job a twentieth sooner.
///
/// # Panics
/// When the future does.
pub async fn as_task<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> T {
    match AbortOnDropHandle::new(tokio::spawn(future)).await {
        Ok(done) => done,
        Err(died) => match died.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and whoever waits goes with it.
            Err(_) => std::future::pending().await,
        },
    }
}
