//! The version of the schema, in the document `schema` of `metadata`, and which programs may work with it.
//!
//! `version` is that of the newest release that has made the schema. `oldest` is that of the oldest release whose programs may go on beside it,
//! as the newest one says. A program that is older, or that meets a newer version without `oldest`, does nothing.

use bson::{Bson, Document, RawDocumentBuf, doc};

use super::{OLDEST_BESIDE, SCHEMA_VERSION};
use crate::{
    base::integer,
    mongo::{Client, StoreError, call, readable},
};

/// The version of a schema whose document has none that can be one: an early one, so that a start makes it right.
const UNREADABLE: i32 = 1;

/// The version of the database's schema; 0 without a schema.
///
/// # Errors
/// [`StoreError::NewerSchema`] if this release may not work with it. Every start, command and first call of a client ends with it.
pub(crate) async fn version(client: &Client) -> Result<i32, StoreError> {
    let metadata = client.metadata.clone_with_type::<RawDocumentBuf>();
    let found = call("schema_version", async move { metadata.find_one(doc! { "_id": "schema" }).await }).await?;
    let Some(found) = found.map(|found| readable(&found)) else { return Ok(0) };
    let version = number(found.get("version")).unwrap_or(UNREADABLE);
    match number(found.get("oldest")) {
        Some(..=SCHEMA_VERSION) => Ok(version),
        None if version <= SCHEMA_VERSION => Ok(version),
        _ => Err(StoreError::NewerSchema { found: version.max(SCHEMA_VERSION + 1), known: SCHEMA_VERSION }),
    }
}

/// A version, of any type of number: shells write doubles. One that is too large is the largest, and not none.
fn number(value: Option<&Bson>) -> Option<i32> {
    let value = value?;
    // As texts, because no number that matters here is changed by it.
    let number: f64 = match (integer(Some(value)), value) {
        (Some(number), _) => number.to_string().parse().ok()?,
        (None, Bson::Decimal128(number)) => number.to_string().parse().ok()?,
        (None, _) => value.as_f64()?,
    };
    if number >= f64::from(i32::MAX) {
        return Some(i32::MAX);
    }
    number.trunc().to_string().parse().ok().filter(|version| *version > 0)
}

/// Notes that programs of this release work here.
pub(super) async fn raise(client: &Client) -> Result<(), StoreError> {
    // `$max` would keep a text.
    let before = |field: &str| {
        let small: Document = doc! { "$min": [field, i32::MAX] };
        let whole = doc! { "$convert": { "input": small, "to": "int", "onError": UNREADABLE } };
        doc! { "$cond": [{ "$isNumber": field }, whole, UNREADABLE] }
    };
    let raised = vec![doc! { "$set": {
        "version": { "$max": [before("$version"), SCHEMA_VERSION] },
        "oldest": { "$max": [before("$oldest"), OLDEST_BESIDE] },
    } }];
    let metadata = client.metadata.clone();
    call("ensure_schema", async move { metadata.update_one(doc! { "_id": "schema" }, raised).upsert(true).await }).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_a_number_of_any_type() {
        let decimal = |text: &str| Bson::Decimal128(text.parse().expect("a number"));
        for (value, expected) in [
            (Bson::Int32(19), Some(19)),
            (Bson::Int64(19), Some(19)),
            (Bson::Double(19.7), Some(19)),
            (decimal("19"), Some(19)),
            (Bson::Int64(3_000_000_000), Some(i32::MAX)),
            (Bson::Double(f64::INFINITY), Some(i32::MAX)),
            (decimal("1E40"), Some(i32::MAX)),
            (Bson::Double(f64::NAN), None),
            (Bson::Double(f64::NEG_INFINITY), None),
            (Bson::Int32(0), None),
            (Bson::Int64(-5), None),
            (Bson::from("19"), None),
            (Bson::Null, None),
        ] {
            assert_eq!(number(Some(&value)), expected, "{value}");
        }
        assert_eq!(number(None), None);
    }
}
