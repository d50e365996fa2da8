//! An entry of the audit.

use bson::Document;
use serde_json::Value;

use super::extended;

/// The stored document with its id as `id`, and without the date of its deletion. One without an `outcome` was intended, and what came out is
/// not known.
pub(crate) fn to_json(entry: Document) -> Value {
    let mut shown = Document::new();
    for (field, value) in entry {
        match field.as_str() {
            "_id" => drop(shown.insert("id", value.as_object_id().map_or_else(|| value.clone(), |id| id.to_hex().into()))),
            "expires_at" => {}
            _ => drop(shown.insert(field, value)),
        }
    }
    extended(shown)
}
