//! Retention by class and finish reason. The cleaner walks the archive by the ends of jobs, once for each period of retention, and deletes what
//! the period covers. Jobs that are kept longer are examined once for each shorter period, not in each pass.

use bson::{Document, RawDocumentBuf, doc};

use crate::{
    base::Instant,
    mongo::{ARCHIVED_BY_END, Store, StoreError, WalkStep},
};

/// The archived jobs that a period of retention covers. It covers some: a class, or all others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Covered {
    /// All jobs of these classes.
    pub classes: Vec<String>,
    /// The jobs of all other classes.
    pub others: Option<OtherClasses>,
}

/// Archived jobs of the classes that have no period of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherClasses {
    /// The classes that have one.
    pub except: Vec<String>,
    /// Which of their jobs.
    pub reasons: Reasons,
}

/// Finish reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reasons {
    /// These.
    Only(Vec<String>),
    /// All but these, and documents without a reason.
    AllBut(Vec<String>),
}

impl Covered {
    /// The filter that goes with the range of the ends. It reads the documents, which no index makes unnecessary: an index of the archive by
    /// class would slow down the end of every job.
    fn condition(&self) -> Document {
        let mut any = Vec::new();
        if !self.classes.is_empty() {
            any.push(doc! { "workable.class": { "$in": &self.classes } });
        }
        if let Some(OtherClasses { except, reasons }) = &self.others {
            any.push(match reasons {
                Reasons::Only(reasons) => doc! { "workable.class": { "$nin": except }, "why": { "$in": reasons } },
                Reasons::AllBut(reasons) => doc! { "workable.class": { "$nin": except }, "why": { "$nin": reasons } },
            });
        }
        doc! { "$or": any }
    }
}

impl Store {
    /// Deletes those of the next `most` archived jobs, by their ends, that ended before `before` and that the period covers; more than `most`
    /// are examined if many ended in the same millisecond. The position is the end of the last job that was examined.
    ///
    /// Filter: ended after the position and before the instant, covered. Index: `archived_by_end`. Invariant: none, the operator configured
    /// the retention; an archived job never changes its end, its class or its reason.
    pub async fn prune_covered(
        &self,
        covered: &Covered,
        position: Option<bson::DateTime>,
        before: Instant,
        most: u64,
    ) -> Result<WalkStep<bson::DateTime>, StoreError> {
        let (archived, index) = (self.archived.clone_with_type::<RawDocumentBuf>(), self.index(ARCHIVED_BY_END));
        let (after, before) = (position.unwrap_or(bson::DateTime::MIN), bson::DateTime::from_chrono(before));
        let which = covered.condition();
        self.indexed("prune_covered", async move {
            let ahead = doc! { "last_execution.ended_at": { "$gt": after, "$lt": before } };
            let bound = archived.find_one(ahead).sort(doc! { "last_execution.ended_at": 1 }).skip(most.saturating_sub(1));
            let bound = bound.projection(doc! { "last_execution.ended_at": 1 }).hint(index.clone()).await?;
            let ended_at = |job: RawDocumentBuf| job.get_document("last_execution").ok()?.get_datetime("ended_at").ok();
            let next = bound.and_then(ended_at);
            let examined = match next {
                Some(next) => doc! { "$gt": after, "$lte": next },
                None => doc! { "$gt": after, "$lt": before },
            };
            let mut old = doc! { "last_execution.ended_at": examined };
            old.extend(which);
            let deleted = archived.delete_many(old).hint(index).await?.deleted_count;
            Ok(WalkStep { deleted, next })
        })
        .await
    }
}
