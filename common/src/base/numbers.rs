//! Whole numbers in documents.

use bson::Bson;

/// An integer of 32 or 64 bits.
pub(crate) fn integer(value: Option<&Bson>) -> Option<i64> {
    value.and_then(|value| value.as_i64().or(value.as_i32().map(i64::from)))
}
