//! Parts of updates whose outcome does not depend on the types of what is stored.
//!
//! A program in another language, or a person, may have stored null, another type or the largest number in a field, and some of these are
//! valid. MongoDB refuses `$inc` and `$push` on them, at each repetition.

use bson::{Bson, Document, doc};

/// A number of the document plus `by`, and at most the largest number. What is no number counts as zero.
pub(crate) fn increased(field: &str, by: i64) -> Document {
    let field = format!("${field}");
    let before = doc! { "$cond": [{ "$isNumber": &field }, &field, 0_i64] };
    doc! { "$min": [{ "$add": [before, by] }, i64::MAX] }
}

/// Sets fields to these values, and removes those whose value is null.
pub(crate) fn literally(fields: Document) -> Document {
    let value = |value| if value == Bson::Null { "$$REMOVE".into() } else { Bson::from(doc! { "$literal": value }) };
    fields.into_iter().map(|(field, of)| (field, value(of))).collect()
}
