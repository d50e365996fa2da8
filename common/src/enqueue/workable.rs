//! Kinds of work that are Rust types.

use serde::{Serialize, de::DeserializeOwned};

use super::{Defaults, NewJob};
use crate::base::json::bson_of;

/// A kind of work: a class name and parameters.
///
/// The struct is stored in its serde form. A worker that has the class decodes it.
///
/// ```
/// use std::time::Duration;
///
/// use recruiter_common::{Defaults, ExponentialBackoff, Workable};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct SendMail {
///     to: String,
/// }
///
/// impl Workable for SendMail {
///     const CLASS: &'static str = "SendMail";
///     type Output = ();
///
///     fn defaults() -> Defaults {
///         Defaults::default().group("mail").retry(ExponentialBackoff::new(5, Duration::from_secs(10)))
///     }
/// }
/// ```
pub trait Workable: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The class name stored in jobs of this kind. Never change it while such jobs are waiting.
    const CLASS: &'static str;

    /// The result type of this kind of job, `()` for no result. The result is stored in the archive and read with
    /// [`Client::result_of`](crate::mongo::Client::result_of).
    type Output: Serialize + DeserializeOwned + Send + 'static;

    /// Default settings of jobs of this kind. A job can override each of them.
    fn defaults() -> Defaults {
        Defaults::default()
    }

    /// Creates a job of this workable. It can be configured further and then enqueued.
    fn as_job(&self) -> NewJob {
        NewJob::of(Self::CLASS, bson_of(self).map_err(|error| error.to_string())).with(Self::defaults())
    }
}

impl NewJob {
    /// One job with many small items of one class, at most [`MOST_ITEMS`](crate::job::bundle::MOST_ITEMS). One worker executes the items one after the
    /// other. The outcome of each item is stored separately, and an item whose outcome is stored is not run again after
    /// a crash. Only failed items are retried, as the retry policy decides for their failures.
    pub fn bundle<W: Workable>(items: impl IntoIterator<Item = W>) -> Self {
        let items = items.into_iter().map(|item| bson_of(&item).map_err(|error| error.to_string()));
        Self::of_items(W::CLASS, items).with(W::defaults())
    }
}
