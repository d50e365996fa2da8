//! Instants: UTC, whole milliseconds, as BSON dates.
//!
//! Used wherever a document carries an instant. chrono's own serde support stays switched off (it would store
//! text, which range queries miss without a word), so every stored instant goes through here or does not compile.

use bson::DateTime as BsonDateTime;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An instant in UTC.
pub type Instant = DateTime<Utc>;

/// For `#[serde(with = "instant::option", default)]`.
pub(crate) mod option {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(instant: &Option<Instant>, to: S) -> Result<S::Ok, S::Error> {
        instant.map(BsonDateTime::from_chrono).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Instant>, D::Error> {
        Ok(Option::<BsonDateTime>::deserialize(from)?.map(BsonDateTime::to_chrono))
    }
}
