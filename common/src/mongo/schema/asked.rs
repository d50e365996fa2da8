//! What processes ask for whose MongoDB user may not make collections and indexes: the leading recruiter makes it.
//!
//! The field `asked` of the document `features` in `metadata` has the names: a feature, a collection that is made with its first use, or
//! [`WHOLE`]. A database without a schema gets no question: the collection of the question would be an application's there.

use std::time::Duration;

use bson::{Document, RawDocumentBuf, doc};

use super::{Feature, begin_at_once, collections::ensure_events, ensure_channel, kind::EVENTS, mend_at_once, version};
use crate::{
    base::{Patience, chain, pause},
    mongo::{Client, StoreError, call, channel::Channel, readable},
};

/// What is asked for if several parts may be missing.
pub(crate) const WHOLE: &str = "schema";
/// How long a call waits for what it has asked for.
pub(crate) const MADE_WITHIN: Duration = Duration::from_secs(10);
/// Interval between two looks at what was asked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Makes a part of the schema. It is repeated if the connection breaks or the primary changes meanwhile: the driver does not repeat such
/// commands. If this MongoDB user may not make it, the leading recruiter is asked for it, and waited for.
///
/// # Errors
/// That of the last attempt to make it.
pub(crate) async fn made_or_asked<F: Future<Output = Result<(), StoreError>>>(
    client: &Client,
    part: &str,
    within: Duration,
    make: impl Fn() -> F,
) -> Result<(), StoreError> {
    let patience = Patience::new(within);
    let mut is_asked = false;
    loop {
        let failed = match make().await {
            Err(error) if error.is_unanswered() || error.lacks_right_of_schema() => error,
            other => return other,
        };
        if failed.lacks_right_of_schema() && !is_asked {
            ask(client, part).await?;
            tracing::warn!(
                part,
                error = chain(&failed),
                "a part of the schema is missing, and this MongoDB user may not make it; waiting for the leading recruiter to make it"
            );
            is_asked = true;
        }
        if patience.is_over() {
            return Err(failed);
        }
        pause(LOOK_EVERY).await;
    }
}

/// Asks the leading recruiter for a part of the schema. A user who may not ask may not write anything.
pub(super) async fn ask(client: &Client, part: &str) -> Result<(), StoreError> {
    if version(client).await? == 0 {
        return may_ask(client).await;
    }
    let asked = doc! { "$set": { "asked": { "$setUnion": [asked_before(), [part]] } } };
    let metadata = client.metadata.clone();
    call("ask_for_schema", async move { metadata.update_one(doc! { "_id": "features" }, vec![asked]).upsert(true).await }).await.map(drop)
}

/// Changes nothing, and needs the right to.
async fn may_ask(client: &Client) -> Result<(), StoreError> {
    // No document has this id.
    let (metadata, nothing, change) = (client.metadata.clone(), doc! { "_id": "rights" }, doc! { "$set": { "checked": true } });
    call("ask_for_schema", async move { metadata.update_one(nothing, change).await }).await.map(drop)
}

/// What was written by hand is no list.
fn asked_before() -> Document {
    doc! { "$cond": [{ "$isArray": "$asked" }, "$asked", []] }
}

/// Makes what was asked for. Called by the leading recruiter.
pub(crate) async fn make_asked(client: &Client) -> Result<(), StoreError> {
    let metadata = client.metadata.clone_with_type::<RawDocumentBuf>();
    let found = call("asked_for_schema", async move { metadata.find_one(doc! { "_id": "features" }).await }).await?;
    let found = found.map(|found| readable(&found)).unwrap_or_default();
    for part in found.get_array("asked").into_iter().flatten().filter_map(|part| part.as_str()) {
        match made(client, part).await {
            Err(error) if error.may_pass() => return Err(error),
            Err(error) => tracing::error!(part, error = chain(&error), "a process has asked for a part of the schema that cannot be made"),
            Ok(false) => continue,
            Ok(true) => tracing::info!(part, "made a part of the schema that a process has asked for, whose MongoDB user may not make it"),
        }
        let without = doc! { "$set": { "asked": { "$setDifference": [asked_before(), [part]] } } };
        let metadata = client.metadata.clone();
        call("forget_asked", async move { metadata.update_one(doc! { "_id": "features" }, vec![without]).await }).await?;
    }
    Ok(())
}

/// Makes it. Returns whether this release knows what it is.
async fn made(client: &Client, part: &str) -> Result<bool, StoreError> {
    let feature = Feature::ALL.into_iter().find(|feature| feature.field() == part);
    match (feature, Channel::of_collection(part)) {
        (Some(feature), _) => begin_at_once(client, feature).await?,
        (_, Some(channel)) => ensure_channel(client, channel).await?,
        _ if part == EVENTS => ensure_events(client, None).await?,
        _ if part == WHOLE => mend_at_once(client, None).await?,
        _ => return Ok(false),
    }
    Ok(true)
}
