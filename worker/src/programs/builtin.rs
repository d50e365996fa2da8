//! Workables for trying and testing Recruiter. None does anything useful.
//!
//! The stock worker registers them with `--builtins`.

use std::{hint::black_box, time::Duration};

use recruiter_common::{enqueue::Workable, instant::monotonic_ns};
use serde::{Deserialize, Serialize};

use super::stopped_by;
use crate::{
    Worker,
    context::Context,
    outcome::NotDone,
    registry::InvalidClass,
    workable::{BlockingExecutable, Executable},
};

/// Adds these workables to a worker.
pub(crate) fn register(worker: Worker) -> Result<Worker, InvalidClass> {
    let worker = worker.register::<Noop>(())?.register::<Sleep>(())?.register::<Fail>(())?.register::<Panic>(())?;
    worker.register::<ExitAbruptly>(())?.register_blocking::<Leak>(())?.register::<Count>(())
}

/// Does nothing. With `tell` its result is the time of the call, in nanoseconds of this machine's monotonic clock.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Noop {
    tell: bool,
}

impl Workable for Noop {
    const CLASS: &'static str = "noop";
    type Output = Option<i64>;
}

impl Executable for Noop {
    type State = ();

    async fn execute(&self, (): &(), _job: &Context) -> Result<Option<i64>, NotDone> {
        Ok(self.tell.then(monotonic_ns))
    }
}

/// Waits for `ms` milliseconds, plus or minus up to `delta_ms`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Sleep {
    ms: u64,
    delta_ms: u64,
}

impl Workable for Sleep {
    const CLASS: &'static str = "sleep";
    type Output = ();
}

impl Executable for Sleep {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<(), NotDone> {
        let ms = rand::random_range(self.ms.saturating_sub(self.delta_ms)..=self.ms.saturating_add(self.delta_ms));
        match tokio::time::timeout(Duration::from_millis(ms), job.cancelled()).await {
            Ok(()) => Err(stopped_by(job)),
            Err(_elapsed) => Ok(()),
        }
    }
}

/// Fails. With `times` it is done when it was retried that often.
#[derive(Debug, Serialize, Deserialize)]
#[serde(default)]
struct Fail {
    class: String,
    message: String,
    times: Option<u32>,
}

impl Default for Fail {
    fn default() -> Self {
        Self { class: "fail".into(), message: "failed as requested".into(), times: None }
    }
}

impl Workable for Fail {
    const CLASS: &'static str = "fail";
    type Output = ();
}

impl Executable for Fail {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<(), NotDone> {
        match self.times {
            Some(times) if job.retries() >= times => Ok(()),
            _ => Err(NotDone::failed(&self.class, &self.message)),
        }
    }
}

/// Panics with `message`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(default)]
struct Panic {
    message: String,
}

impl Default for Panic {
    fn default() -> Self {
        Self { message: "panicked as requested".into() }
    }
}

impl Workable for Panic {
    const CLASS: &'static str = "panic";
    type Output = ();
}

impl Executable for Panic {
    type State = ();

    async fn execute(&self, (): &(), _job: &Context) -> Result<(), NotDone> {
        panic!("{}", self.message)
    }
}

/// Ends the worker's process at once with the exit code `code`, like a crash.
#[derive(Debug, Serialize, Deserialize)]
#[serde(default)]
struct ExitAbruptly {
    code: i32,
}

impl Default for ExitAbruptly {
    fn default() -> Self {
        Self { code: 1 }
    }
}

impl Workable for ExitAbruptly {
    const CLASS: &'static str = "exit-abruptly";
    type Output = ();
}

impl Executable for ExitAbruptly {
    type State = ();

    async fn execute(&self, (): &(), _job: &Context) -> Result<(), NotDone> {
        std::process::exit(self.code)
    }
}

/// Makes the worker's resident memory grow by `mib` MiB. The memory is freed afterwards if `keep` is false.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Leak {
    mib: u64,
    #[serde(default = "yes")]
    keep: bool,
}

fn yes() -> bool {
    true
}

impl Workable for Leak {
    const CLASS: &'static str = "leak";
    type Output = ();
}

impl BlockingExecutable for Leak {
    type State = ();

    fn execute(&self, (): &(), _job: &Context) -> Result<(), NotDone> {
        let bytes = self.mib.checked_mul(1024 * 1024).map(usize::try_from);
        let Some(Ok(bytes)) = bytes else {
            return Err(NotDone::failed("leak", format!("{} MiB is more than the address space", self.mib)));
        };
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes)?;
        // Not zeros: the kernel gives pages of zeros no memory.
        memory.resize(bytes, 1_u8);
        black_box(&memory);
        if self.keep {
            memory.leak();
        }
        Ok(())
    }
}

/// Counts to `to`, one number in `ms` milliseconds. It reports its progress, and continues at the checkpoint of an earlier attempt. Its
/// result says where it began.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Count {
    to: u64,
    ms: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Counted {
    from: u64,
    to: u64,
}

impl Workable for Count {
    const CLASS: &'static str = "count";
    type Output = Counted;
}

impl Executable for Count {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<Counted, NotDone> {
        let from = job.last_checkpoint()?.unwrap_or(0);
        job.log(format!("attempt {} begins at {from}", job.attempt()));
        for next in from..self.to {
            job.progress((next, self.to));
            if tokio::time::timeout(Duration::from_millis(self.ms), job.cancelled()).await.is_ok() {
                return Err(stopped_by(job));
            }
            job.save_checkpoint(next + 1).await?;
        }
        job.progress((self.to, self.to));
        Ok(Counted { from, to: self.to })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bson::{Bson, doc};
    use recruiter_common::failure;

    use super::*;
    use crate::{
        cancellation::Cancellation,
        outcome::Done,
        programs::program::tests::{context, context_of_attempt},
    };

    async fn run(class: &str, parameters: bson::Document, job: &Arc<Context>) -> Result<Done, NotDone> {
        let worker = register(Worker::new()).unwrap();
        worker.registry.handler(class).unwrap().decode(Bson::Document(parameters)).unwrap().execute(job).await
    }

    #[tokio::test]
    async fn sleep_ends_by_itself_or_when_it_is_asked_to() {
        assert_eq!(run("sleep", doc! {}, &context()).await, Ok(Done::default()));
        assert_eq!(run("sleep", doc! { "ms": 1, "delta_ms": 5 }, &context()).await, Ok(Done::default()));
        let job = context();
        job.cancel.cancel(Cancellation::WorkerStopping);
        let Err(NotDone::Stopped(why)) = run("sleep", doc! { "ms": 600_000 }, &job).await else { panic!("not stopped") };
        assert_eq!(why.class, failure::INTERRUPTED);
    }

    #[tokio::test]
    async fn fail_fails_as_often_as_it_is_told() {
        assert_eq!(run("fail", doc! {}, &context()).await, Err(NotDone::failed("fail", "failed as requested")));
        let parameters = doc! { "class": "a", "message": "b", "times": 2 };
        assert_eq!(run("fail", parameters.clone(), &context_of_attempt(2)).await, Err(NotDone::failed("a", "b")));
        assert_eq!(run("fail", parameters, &context_of_attempt(3)).await, Ok(Done::default()));
    }

    #[tokio::test]
    #[should_panic(expected = "like this")]
    async fn panic_panics() {
        let _ = run("panic", doc! { "message": "like this" }, &context()).await;
    }

    #[tokio::test]
    async fn leak_makes_resident_memory_grow() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/statm").unwrap();
            status.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4 / 1024
        };
        let before = resident();
        // Several times: free memory need not return to the system, but it is used again. And the other tests of this process need memory.
        for (parameters, grows) in [(doc! { "mib": 64, "keep": false }, false), (doc! { "mib": 64 }, true)] {
            let mut has_grown = Vec::new();
            for _ in 0..3 {
                for _ in 0..4 {
                    assert_eq!(run("leak", parameters.clone(), &context()).await, Ok(Done::default()));
                }
                has_grown.push(resident() >= before + 192);
            }
            assert!(has_grown.contains(&grows), "{parameters}: {has_grown:?}");
        }
        assert!(run("leak", doc! { "mib": i64::MAX }, &context()).await.is_err());
    }
}
