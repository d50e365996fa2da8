//! How many jobs may wait in a group, a field of the document with the settings of the group, and how many wait.
//!
//! Each setting is a field of its own, which is written alone, so that releases and programs with other settings keep them.

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;
use mongodb::options::{Hint as IndexHint, ReadConcern};

use super::{
    Store, StoreError, call,
    schema::{DUE_JOBS, GATED_JOBS, any_gate},
};
use crate::names::check_name;

/// Maximum number of groups with settings that are read.
const GROUPS: i64 = 10_000;
/// Largest number of waiting jobs that a setting allows.
const LARGEST_CAP: u64 = 1_000_000_000;

/// The settings of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupBacklog {
    /// The group.
    pub group: String,
    /// With this many waiting jobs the group accepts no further ones; `None`: any number.
    pub most_waiting: Option<u64>,
}

/// Why a setting of a group was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSetting {
    /// The name of the group is invalid.
    #[error("the name of a group {0}")]
    Group(String),
    /// The number is not possible.
    #[error("{0} is no possible number of waiting jobs of a group: give a number from 1 to {LARGEST_CAP}, or remove the setting")]
    MostWaiting(u64),
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn settings_of(document: &Document) -> Option<GroupBacklog> {
    let group = document.get_str("_id").ok()?.to_owned();
    let most_waiting = match document.get("most_waiting") {
        // mongosh stores numbers as floating-point numbers; the validator accepts only integers.
        Some(Bson::Int32(most)) => u64::try_from(*most).ok(),
        Some(Bson::Int64(most)) => u64::try_from(*most).ok(),
        _ => None,
    };
    Some(GroupBacklog { group, most_waiting: most_waiting.filter(|most| *most > 0) })
}

impl Store {
    /// The settings of all groups that have any, by name.
    ///
    /// Index: `_id`. Invariant: I9, an invalid document hides no other.
    pub async fn group_backlogs(&self) -> Result<Vec<GroupBacklog>, StoreError> {
        let groups = self.groups.clone();
        let found: Vec<Document> = call("group_backlogs", async move {
            groups.find(doc! {}).sort(doc! { "_id": 1 }).limit(GROUPS).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        Ok(found.iter().filter_map(settings_of).collect())
    }

    /// Sets with how many waiting jobs a group accepts no further ones; `None` removes the setting. Other settings stay as they are.
    /// Processes that enqueue notice the change within about a second.
    ///
    /// Filter: the group. Index: `_id`. Invariant: none, an operator's setting.
    ///
    /// # Errors
    /// [`InvalidSetting`]. A setting that is not possible is refused before anything is sent.
    pub async fn set_most_waiting(&self, group: &str, most: Option<u64>) -> Result<(), InvalidSetting> {
        check_name(group).map_err(InvalidSetting::Group)?;
        let change = match most {
            Some(most) if (1..=LARGEST_CAP).contains(&most) => doc! { "$set": { "most_waiting": i64::try_from(most).unwrap_or(i64::MAX) } },
            Some(most) => return Err(InvalidSetting::MostWaiting(most)),
            None => doc! { "$unset": { "most_waiting": "" } },
        };
        let (groups, id) = (self.groups.clone(), doc! { "_id": group });
        let is_set = most.is_some();
        call("set_most_waiting", async move { groups.update_one(id, change).upsert(is_set).await }).await?;
        self.caps.forget();
        self.tell_plain("group.changed", doc! { "name": group });
        Ok(())
    }

    /// The number of jobs that wait in a group, whenever they are due; counted up to `most`.
    ///
    /// Filter: group, unlocked. Index: `due_jobs` and `gated_jobs`, up to `most` entries. Invariant: none, the number is out of date when it
    /// arrives.
    pub async fn waiting_in(&self, group: &str, most: u64) -> Result<u64, StoreError> {
        let mut waiting = 0;
        for (index, gate) in [(DUE_JOBS, Bson::Null), (GATED_JOBS, any_gate().into())] {
            let (scheduled, unlocked) = (self.scheduled.clone(), doc! { "group": group, "locked": false, "gate": gate });
            let left = most - waiting;
            if left == 0 {
                break;
            }
            let counted = async move {
                let count = scheduled.count_documents(unlocked).limit(left).hint(IndexHint::Name(index.into()));
                count.read_concern(ReadConcern::local()).await
            };
            waiting += self.indexed("waiting_in", counted).await?;
        }
        Ok(waiting)
    }
}
