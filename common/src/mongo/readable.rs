//! Reads documents that may have invalid texts.
//!
//! The driver decodes a whole batch, and one document with bytes that are no UTF-8 fails it. So every read of documents decodes each of them
//! by itself (I9). An invalid text gets replacement characters, and a process warns once of each such document. Where a text decides what is
//! done or is passed on, the reader takes the document as it is stored, and leaves out what it cannot decode.

use bson::Utf8Lossy;
use std::{
    collections::HashSet,
    sync::{LazyLock, Mutex, PoisonError},
};

use bson::{Document, RawDocument, RawDocumentBuf};
use futures_util::TryStreamExt;
use mongodb::{Cursor, error::Error};

use super::current_operation;

/// Maximum number of unreadable documents that a process remembers, so that it warns of each of them once.
const REMEMBERED: usize = 1_000;

/// What was warned of: the operation, and the id of the document.
type Warned = HashSet<(Option<&'static str>, String)>;

static WARNED: LazyLock<Mutex<Warned>> = LazyLock::new(Mutex::default);

/// Reads all documents of a cursor.
pub(crate) trait Readable {
    /// The documents. Bytes that are no UTF-8 are replaced.
    async fn readable(self) -> Result<Vec<Document>, Error>;
}

impl Readable for Cursor<Document> {
    async fn readable(self) -> Result<Vec<Document>, Error> {
        self.with_type::<RawDocumentBuf>().map_ok(|stored| readable(&stored)).try_collect().await
    }
}

/// A document. Bytes that are no UTF-8 are replaced.
pub(crate) fn readable(stored: &RawDocument) -> Document {
    Document::try_from(stored).unwrap_or_else(|error| {
        let document = lossy(stored);
        let id = document.get("_id").map_or_else(|| "(none)".to_owned(), |id| id.as_str().map_or_else(|| id.to_string(), str::to_owned));
        let operation = current_operation();
        if is_first(operation, &id) {
            tracing::warn!(
                operation,
                id,
                %error,
                "a document in MongoDB has bytes that are no UTF-8, which are read as replacement characters; correct or delete it"
            );
        }
        document
    })
}

/// Whether this process is to warn of this document, because it has not done so yet in this operation.
pub(crate) fn is_first(operation: Option<&'static str>, id: &str) -> bool {
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    warned.len() < REMEMBERED && warned.insert((operation, id.to_owned()))
}

/// Decodes the readable part of a document. Invalid UTF-8 gets replacement characters. A document with other damage
/// keeps the fields before the damage.
pub fn lossy(document: &RawDocument) -> Document {
    if let Ok(Utf8Lossy(whole)) = Utf8Lossy::<Document>::try_from(document) {
        return whole;
    }
    let readable = document.iter_elements().map_while(Result::ok);
    readable.filter_map(|element| Some((element.key().as_str().to_owned(), element.value_utf8_lossy().ok()?.try_into().ok()?))).collect()
}
