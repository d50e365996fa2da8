//! The defaults of classes, which workers declare: in `metadata`, a document `class:NAME` for each class that has some.

use bson::{Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;

use super::class_defaults::{ClassDefaults, Classes};
use crate::mongo::{Store, StoreError, call, readable};

/// The begin of the `_id` of the defaults of a class. It is a text, because documents as ids are counts, which cleaners delete.
const CLASS: &str = "class:";

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
            let mut document = Document::try_from(stored).ok()?;
            document.remove("_id");
            match ClassDefaults::of_document(document) {
                Ok(defaults) => Some((class, defaults)),
                Err(error) => {
                    tracing::warn!(class, %error, "the defaults of a class cannot be decoded: correct or delete the document in `metadata`");
                    None
                }
            }
        };
        Ok(found.into_iter().filter_map(read).collect())
    }

    /// Replaces the defaults of a class, or removes them if there are none any more.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub async fn declare_class(&self, class: &str, defaults: &ClassDefaults) -> Result<(), StoreError> {
        let (metadata, id) = (self.metadata.clone(), doc! { "_id": format!("{CLASS}{class}") });
        let document = defaults.to_document();
        if document.is_empty() {
            return call("declare_class", async move { metadata.delete_one(id).await }).await.map(drop);
        }
        call("declare_class", async move { metadata.replace_one(id, document).upsert(true).await }).await.map(drop)
    }
}
