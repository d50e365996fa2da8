//! A context for the unit tests of workables.

use std::{sync::Arc, time::Duration};

use bson::doc;
use recruiter_common::{
    Client,
    ids::{JobId, StartId},
    job::Job,
    json::bson_of,
    store::Store,
};

use super::{Context, Item, NotesCell};
use crate::{
    cancellation::{Cancel, Cancellation},
    deadline::Deadline,
};

impl Context {
    /// A context for unit tests, without MongoDB. The methods of [`ForTests`] change its values.
    ///
    /// ```
    /// # use recruiter_worker::{Context, Executable, NotDone, Workable};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Greet { name: String }
    /// # impl Workable for Greet { const CLASS: &'static str = "Greet"; type Output = String; }
    /// impl Executable for Greet {
    ///     type State = ();
    ///
    ///     async fn execute(&self, (): &(), job: &Context) -> Result<String, NotDone> {
    ///         Ok(format!("hello, {}, for the {}. time", self.name, job.attempt()))
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let second = Context::for_tests().attempt(2).build();
    /// let greeting = Greet { name: "Ada".into() }.execute(&(), &second).await;
    /// assert_eq!(greeting.unwrap(), "hello, Ada, for the 2. time");
    /// # }
    /// ```
    pub fn for_tests() -> ForTests {
        ForTests::default()
    }
}

/// Builds a [`Context`] for unit tests.
#[derive(Clone, Debug, Default)]
#[must_use = "`build` creates the context"]
pub struct ForTests {
    class: Option<String>,
    group: Option<String>,
    attempt: Option<u32>,
    is_last_attempt: bool,
    item: Option<Item>,
    cancelled: Option<Cancellation>,
    time_limit: Option<Duration>,
    tags: Vec<String>,
    urn: Option<String>,
    store: Option<Arc<Store>>,
    checkpoint: Option<bson::Bson>,
}

impl ForTests {
    /// Sets the class.
    pub fn class(mut self, class: impl Into<String>) -> Self {
        self.class = Some(class.into());
        self
    }

    /// Sets the group.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = Some(group.into());
        self
    }

    /// Adds a tag.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Sets the URN.
    pub fn urn(mut self, urn: impl Into<String>) -> Self {
        self.urn = Some(urn.into());
        self
    }

    /// Sets the connection of the worker.
    pub fn client(mut self, client: &Client) -> Self {
        self.store = Some(Arc::new(client.clone().into()));
        self
    }

    /// Sets the number of this start. Default: 1.
    pub fn attempt(mut self, number: u32) -> Self {
        self.attempt = Some(number);
        self
    }

    /// A failure of this run would be the last.
    pub fn last_attempt(mut self) -> Self {
        self.is_last_attempt = true;
        self
    }

    /// The execution runs item `index` of a bundle of `of` items.
    pub fn item(mut self, index: usize, of: usize) -> Self {
        self.item = Some(Item { index, of });
        self
    }

    /// Sets a time limit, which begins with [`ForTests::build`].
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// The execution is already cancelled, for this reason.
    pub fn cancelled(mut self, why: Cancellation) -> Self {
        self.cancelled = Some(why);
        self
    }

    /// Sets the checkpoint of an earlier attempt.
    ///
    /// # Panics
    /// When it cannot be expressed in BSON.
    pub fn checkpoint(mut self, value: impl serde::Serialize) -> Self {
        self.checkpoint = Some(bson_of(&value).expect("a checkpoint that BSON can express"));
        self
    }

    /// The context.
    pub fn build(self) -> Context {
        let job = doc! {
            "_id": JobId::new(),
            "locked": false,
            "group": self.group.unwrap_or_else(|| "generic".into()),
            "workable": { "class": self.class.unwrap_or_else(|| "test".into()) },
            "scheduled_at": bson::DateTime::now(),
            "attempts": self.attempt.unwrap_or(1),
            "tags": self.tags,
            "urn": self.urn,
            "checkpoint": self.checkpoint,
        };
        let cancel = Arc::new(Cancel::default());
        if let Some(why) = self.cancelled {
            cancel.cancel(why);
        }
        let deadline = Deadline::default();
        if let Some(limit) = self.time_limit {
            deadline.begin(limit);
        }
        Context {
            job: Arc::new(Job::try_from(job).expect("all that a job must have")),
            store: self.store,
            start: StartId::new(),
            is_last_attempt: self.is_last_attempt,
            last_execution: None,
            item: self.item,
            deadline,
            cancel,
            ends: None,
            own_end: Arc::default(),
            notes: NotesCell::default(),
            retry_after: Default::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::deadline::LONGEST_EXTENSION;

    #[tokio::test]
    async fn a_context_for_tests_is_what_it_is_said_to_be() {
        let job =
            Context::for_tests().class("a").group("b").attempt(3).last_attempt().item(1, 9).cancelled(Cancellation::Requested).build();
        assert_eq!((job.class(), job.group(), job.attempt(), job.retries(), job.is_last_attempt()), ("a", "b", 3, 2, true));
        assert_eq!((job.item(), job.cancellation()), (Some(Item { index: 1, of: 9 }), Some(Cancellation::Requested)));
        job.cancelled().await;
        let job = Context::for_tests().tag("x").tag("y").urn("urn:z").build();
        assert_eq!((job.tags(), job.urn()), (["x".to_owned(), "y".to_owned()].as_slice(), Some("urn:z")));
        assert!(!Context::for_tests().build().is_cancelled());
    }

    #[test]
    fn a_time_limit_is_extended_until_it_has_passed_and_never_overflows() {
        let (second, job) = (Duration::from_secs(1), |limit| Context::for_tests().time_limit(limit).build());
        let long = job(second * 60);
        let begun = long.deadline().unwrap();
        assert_eq!((long.extend(second), long.extend(second)), (Some(begun + second), Some(begun + second * 2)));
        let latest = long.extend(Duration::MAX).expect("it is moved as far as possible");
        assert!(latest > begun + LONGEST_EXTENSION / 2 && latest <= Instant::now() + LONGEST_EXTENSION);
        assert!(long.extend(Duration::MAX).is_some_and(|at| at >= latest), "never earlier");
        assert_eq!(job(Duration::ZERO).extend(second), None, "it has passed");
        assert_eq!(job(Duration::MAX).extend(second), None, "it never passes");
        assert_eq!(Context::for_tests().build().extend(second), None, "there is none");
        assert_eq!(Context::for_tests().time_limit(second).cancelled(Cancellation::Requested).build().extend(second), None);
    }
}
