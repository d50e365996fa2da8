//! Bundles: many small items of one class in one job, each with an outcome of its own.
//!
//! In the document, `workable.items` has the parameters of the items, and `item_outcomes` has under the same index the outcome
//! of each: null while nothing is recorded, `"done"` or `{done: true, result: …}`, or `{class, message, trace, why}` of a failure,
//! with `why` once it is final.
//!
//! The worker writes outcomes in batches while the bundle runs, and all of them with the end of the run. If the worker dies, the crash verdict
//! of the start holds for the bundle. Either the next start executes the items without a final outcome, also one that ended after the last
//! acknowledged write. Or the bundle is archived as `worker-died`, and the outcome of such an item stays null.
//!
//! Used by the enqueuer (limits), the worker (the pending items) and the command line.

use bson::{Bson, RawBsonRef, RawDocument, doc};

use super::FinishReason;
use crate::base::Failure;

/// The field that holds the outcomes of the items.
pub(crate) const OUTCOMES: &str = "item_outcomes";
/// Maximum number of items of one bundle.
pub const MOST_ITEMS: usize = 1_000;
/// Maximum size of the result of one item, in bytes of BSON. The results of all items must fit into the job's document.
const LARGEST_RESULT: usize = 4 * 1024;
/// Maximum nesting of documents and arrays in a result. It is below MongoDB's limit.
const DEEPEST_RESULT: usize = 64;
/// Maximum length of the message of an item's failure, in bytes.
const LONGEST_MESSAGE: usize = 2 * 1024;
/// Maximum length of its trace, in bytes.
const LONGEST_TRACE: usize = 1024;
/// The stored outcome of an item that is done without a result.
const DONE: &str = "done";

/// The outcome of one item.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ItemOutcome {
    /// The item is done.
    Done {
        /// The result of the item, stored with the outcome.
        result: Option<Bson>,
    },
    /// The item failed.
    Failed {
        /// The failure of the item.
        failure: Failure,
        /// The reason why it is not retried; `None` if it will be.
        last: Option<FinishReason>,
    },
}

impl From<ItemOutcome> for Bson {
    /// The stored form, limited in size so that MongoDB accepts it.
    fn from(outcome: ItemOutcome) -> Self {
        match outcome {
            ItemOutcome::Done { result: None } => Bson::String(DONE.into()),
            ItemOutcome::Done { result: Some(result) } => {
                let wrapped = doc! { "done": true, "result": result };
                let fits = wrapped.to_vec().is_ok_and(|bytes| bytes.len() <= LARGEST_RESULT);
                if fits && wrapped.get("result").is_some_and(|result| is_flat(result, DEEPEST_RESULT)) {
                    Bson::Document(wrapped)
                } else {
                    Bson::Document(doc! { "done": true, "result_dropped": "the result is too large for an item or cannot be stored" })
                }
            }
            ItemOutcome::Failed { failure, last } => {
                let failure = failure.shortened(LONGEST_MESSAGE, LONGEST_TRACE);
                let mut stored = doc! { "class": failure.class, "message": failure.message };
                stored.extend(failure.trace.map(|trace| ("trace".to_owned(), trace.into())));
                stored.extend(last.map(|why| ("why".to_owned(), why.into())));
                Bson::Document(stored)
            }
        }
    }
}

fn is_flat(value: &Bson, deepest: usize) -> bool {
    let inner: Vec<&Bson> = match value.as_document() {
        Some(document) => document.values().collect(),
        None => value.as_array().map(|list| list.iter().collect()).unwrap_or_default(),
    };
    inner.is_empty() || deepest > 0 && inner.into_iter().all(|value| is_flat(value, deepest - 1))
}

/// Whether an item with this stored outcome must still run.
pub fn is_pending(outcome: &Bson) -> bool {
    match outcome.as_document() {
        Some(outcome) => !outcome.get_bool("done").unwrap_or(false) && !outcome.contains_key("why"),
        None => *outcome == Bson::Null,
    }
}

/// Whether an item with this stored outcome is done.
pub fn is_done(outcome: &Bson) -> bool {
    !is_pending(outcome) && failure_of(outcome).is_none()
}

/// The stored failure of an item, and its finish reason if it is final; `None` if the item has not failed.
pub fn failure_of(outcome: &Bson) -> Option<(Failure, Option<FinishReason>)> {
    let outcome = outcome.as_document()?;
    let failure = Failure::new(outcome.get_str("class").ok()?, outcome.get_str("message").unwrap_or_default());
    Some((failure, outcome.get_str("why").ok().map(|why| FinishReason::custom(why.to_owned()))))
}

/// Why a job with `items` is not a valid bundle.
#[derive(Debug, thiserror::Error)]
#[error("the document is not a valid bundle: {0}")]
pub struct InvalidBundle(String);

/// The recorded outcomes of the items of a bundle.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Bundle {
    /// The stored outcome of each item; null if there is none.
    pub outcomes: Vec<Bson>,
    /// Whether the array in the document has an entry for each item.
    pub has_list: bool,
}

impl Bundle {
    /// The bundle in a job's document, if it is one.
    pub(crate) fn of(job: &RawDocument) -> Result<Option<Self>, InvalidBundle> {
        let items = match job.get_document("workable").ok().and_then(|workable| workable.get("items").ok().flatten()) {
            None | Some(RawBsonRef::Null) => return Ok(None),
            Some(RawBsonRef::Array(items)) => items.into_iter().count(),
            Some(_) => return Err(InvalidBundle("`items` is not an array".into())),
        };
        if items == 0 || items > MOST_ITEMS {
            return Err(InvalidBundle(format!("it has {items} items instead of 1 to {MOST_ITEMS}")));
        }
        let mut outcomes = match job.get(OUTCOMES).ok().flatten().map(Bson::try_from) {
            None | Some(Ok(Bson::Null)) => Vec::new(),
            Some(Ok(Bson::Array(outcomes))) if outcomes.len() <= items => outcomes,
            Some(_) => return Err(InvalidBundle("`item_outcomes` is not an array, or has more entries than `items`".into())),
        };
        let is_outcome = |outcome: &Bson| match outcome.as_document() {
            Some(outcome) => outcome.get_bool("done").unwrap_or(false) || outcome.get_str("class").is_ok(),
            None => *outcome == Bson::Null || outcome.as_str() == Some(DONE),
        };
        if let Some(index) = outcomes.iter().position(|outcome| !is_outcome(outcome)) {
            return Err(InvalidBundle(format!("`item_outcomes.{index}` is not an outcome")));
        }
        let has_list = outcomes.len() == items;
        outcomes.resize(items, Bson::Null);
        Ok(Some(Self { outcomes, has_list }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_reads_well_and_always_fits() {
        let check = |outcome: ItemOutcome, expected: Bson| assert_eq!(Bson::from(outcome), expected);
        check(ItemOutcome::Done { result: None }, "done".into());
        check(ItemOutcome::Done { result: Some(1.into()) }, doc! { "done": true, "result": 1 }.into());
        let failure = Failure::new("c", "m").with_trace("t");
        check(ItemOutcome::Failed { failure: failure.clone(), last: None }, doc! { "class": "c", "message": "m", "trace": "t" }.into());
        let last = Bson::from(ItemOutcome::Failed { failure, last: Some(FinishReason::GAVE_UP) });
        assert_eq!(failure_of(&last), Some((Failure::new("c", "m"), Some(FinishReason::GAVE_UP))));
        let deep = (0..100).fold(Bson::Null, |inner, _| Bson::Array(vec![inner]));
        for result in [Bson::from("x".repeat(LARGEST_RESULT)), deep, doc! { "a\0b": 1 }.into()] {
            let stored = Bson::from(ItemOutcome::Done { result: Some(result) });
            assert!(stored.as_document().is_some_and(|stored| stored.contains_key("result_dropped")), "{stored}");
        }
        let long = Failure::new("c".repeat(999), "m".repeat(9_999)).with_trace("t".repeat(9_999));
        let stored = doc! { "": ItemOutcome::Failed { failure: long, last: Some(FinishReason::TRIED_TOO_MANY_TIMES) } };
        assert!(stored.to_vec().is_ok_and(|bytes| bytes.len() <= LARGEST_RESULT));
    }

    #[test]
    fn done_and_given_up_is_done_with_and_a_failure_is_not() {
        for (outcome, pending) in [
            (Bson::Null, true),
            ("done".into(), false),
            (doc! { "done": true, "result": 1 }.into(), false),
            (doc! { "class": "c", "message": "m" }.into(), true),
            (doc! { "class": "c", "message": "m", "why": "gave-up" }.into(), false),
        ] {
            assert_eq!(is_pending(&outcome), pending, "{outcome}");
        }
    }

    #[test]
    fn what_is_no_bundle_is_told_from_what_is_a_bad_one() {
        let check = |items: Bson, outcomes: Bson| {
            let job = doc! { "workable": { "class": "c", "items": items }, "item_outcomes": outcomes };
            let job = bson::RawDocumentBuf::try_from(&job).expect("a document");
            Bundle::of(&job).map(|bundle| bundle.map(|bundle| (bundle.outcomes, bundle.has_list))).map_err(|error| error.to_string())
        };
        let items = |count: usize| Bson::Array(vec![doc! {}.into(); count]);
        assert_eq!(check(Bson::Null, Bson::Null), Ok(None));
        assert_eq!(check(items(2), Bson::Null), Ok(Some((vec![Bson::Null; 2], false))));
        assert_eq!(check(items(1), Bson::Array(vec!["done".into()])), Ok(Some((vec!["done".into()], true))));
        for (items, outcomes) in [
            (doc! {}.into(), Bson::Null),
            (items(0), Bson::Null),
            (items(MOST_ITEMS + 1), Bson::Null),
            (items(1), "done".into()),
            (items(1), Bson::Array(vec![Bson::Null; 2])),
            (items(1), Bson::Array(vec![1.into()])),
        ] {
            assert!(check(items, outcomes).is_err_and(|error| error.starts_with("the document is not a valid bundle")));
        }
    }
}
