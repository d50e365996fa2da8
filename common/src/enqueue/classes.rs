//! The defaults of classes, which workers declare: in `metadata`, a document `class:NAME` for each class that has some.

use std::collections::HashMap;

use bson::{RawDocumentBuf, doc};
use futures_util::TryStreamExt;

use super::spec::{InvalidSpec, JobSpec, UnknownPolicies};
use crate::{
    base::{Instant, of_bson},
    job::Settings,
    mongo::{Store, StoreError, call, readable},
};

/// The begin of the `_id` of the defaults of a class. It is a text, because documents as ids are counts, which cleaners delete.
const CLASS: &str = "class:";

/// The settings that workers have declared for the jobs of a class, by class: see [`Store::class_defaults`]. A job that names resources, or is
/// in a line, does not get the limits of its class.
pub type Classes = HashMap<String, Settings>;

impl Store {
    /// The defaults of all classes that have some. A document that is not valid is left out and logged.
    ///
    /// Filter: ids of classes. Index: `_id`. Invariant: none.
    pub async fn class_defaults(&self) -> Result<Classes, StoreError> {
        let metadata = self.metadata.clone_with_type::<RawDocumentBuf>();
        // `;` follows `:`.
        let any = doc! { "_id": { "$gte": CLASS, "$lt": "class;" } };
        let found: Vec<RawDocumentBuf> =
            call("class_defaults", async move { metadata.find(any).batch_size(10_000).await?.try_collect().await }).await?;
        let read = |stored: RawDocumentBuf| {
            let class = readable(&stored).get_str("_id").ok()?.strip_prefix(CLASS)?.to_owned();
            // The defaults are for jobs, which never get a text that is not the stored one.
            match Settings::of_fields(&stored) {
                Ok(defaults) => Some((class, defaults)),
                Err(error) => {
                    let error = of_bson(&error);
                    tracing::warn!(class, error, "the defaults of a class cannot be decoded: correct or delete the document in `metadata`");
                    None
                }
            }
        };
        Ok(found.into_iter().filter_map(read).collect())
    }

    /// Replaces the defaults of a class, or removes them if there are none any more.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub async fn declare_class(&self, class: &str, defaults: &Settings) -> Result<(), StoreError> {
        let (metadata, id) = (self.metadata.clone(), doc! { "_id": format!("{CLASS}{class}") });
        let document = defaults.fields().unwrap_or_default();
        if document.is_empty() {
            return call("declare_class", async move { metadata.delete_one(id).await }).await.map(drop);
        }
        call("declare_class", async move { metadata.replace_one(id, document).upsert(true).await }).await.map(drop)
    }
}

/// Checks that a job of this class can have these defaults.
///
/// # Errors
/// When it cannot.
pub fn check_defaults(class: &str, defaults: &Settings) -> Result<(), InvalidSpec> {
    let spec = JobSpec { class: class.to_owned(), settings: defaults.clone(), ..JobSpec::default() };
    let job = spec.into_job(UnknownPolicies::Refuse)?;
    job.into_document(Instant::default()).map(drop).map_err(|problem| InvalidSpec::new(problem.to_string()))
}

impl JobSpec {
    /// The same, with the defaults that workers have declared for its class in place of missing settings.
    #[must_use]
    pub fn with_defaults(mut self, classes: &Classes) -> Self {
        if let Some(defaults) = classes.get(&self.class) {
            self.settings = self.settings.or(defaults);
        }
        self
    }
}
