//! The settings that operators change while the system runs: limits, groups and pauses.

use std::{collections::BTreeMap, time::Duration};

use bson::{Bson, Document};

use super::{
    AGEING, GroupSettings, InvalidSetting, Limit, MaintenanceWindow, Pause, Paused, WEIGHTS, backlogs::check_most_waiting, check_group,
    check_limit, check_limit_name, settings::window_to_document,
};
use crate::{
    base::check_trimmed_name,
    job::group_of_resource,
    mongo::{Client, Store, StoreError, schema::MOST_WINDOWS},
};

/// Why a setting was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// The name or the value is not valid.
    #[error(transparent)]
    Invalid(#[from] InvalidSetting),
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Client {
    /// The limits of resources and groups.
    pub fn limits(&self) -> Limits {
        Limits(self.store())
    }

    /// The settings of groups that decide when their jobs start, and how many may wait.
    pub fn groups(&self) -> Groups {
        Groups(self.store())
    }

    /// The pauses of jobs.
    pub fn pauses(&self) -> Pauses {
        Pauses(self.store())
    }
}

/// The limits of resources and groups: [`Client::limits`].
#[derive(Clone, Debug)]
pub struct Limits(Store);

impl Limits {
    /// All limits of resources, by their name or prefix, without those that are not valid. The limits of groups are in [`Groups::list`].
    ///
    /// # Errors
    /// An error of MongoDB.
    pub async fn list(&self) -> Result<BTreeMap<String, Limit>, StoreError> {
        Ok(self.0.settings().await?.limits)
    }

    /// Sets the limit of a resource, of each resource with a prefix (`customer:*`), or of a group (`@mail`). It holds from now on: a lower
    /// capacity ends no running job.
    ///
    /// # Errors
    /// When the name is not one, the limit is empty, or the capacity is not from 1 to [`LARGEST_CAPACITY`](crate::mongo::schema::LARGEST_CAPACITY); or an error of MongoDB.
    pub async fn set(&self, name: &str, limit: Limit) -> Result<(), SettingError> {
        check_limit_name(name)?;
        check_limit(limit)?;
        Ok(self.0.put_limit(name, limit).await?)
    }

    /// Removes a limit. Jobs that name the resource wait until it has a limit again; a group has no limit then. Returns whether there was one.
    ///
    /// # Errors
    /// An error of MongoDB.
    pub async fn remove(&self, name: &str) -> Result<bool, SettingError> {
        Ok(self.0.if_set_up(self.0.delete_limit(name)).await?)
    }

    /// Sets how many jobs may wait for a resource with this limit; `None` removes the setting. Under a prefix (`customer:*`) this holds for each
    /// resource by itself. Jobs that need exactly the same resources are counted together. A further enqueueing call is refused
    /// ([`EnqueueError::GateFull`](crate::enqueue::EnqueueError::GateFull)). Processes that enqueue notice the change within about a second.
    ///
    /// # Errors
    /// When there is no such limit or the number is not possible, or an error of MongoDB.
    pub async fn set_most_waiting(&self, name: &str, most: Option<u64>) -> Result<(), SettingError> {
        check_limit_name(name)?;
        let refused = |problem: String| SettingError::Invalid(InvalidSetting(problem));
        if let Some(group) = group_of_resource(name) {
            return Err(refused(format!("set how many jobs may wait in the group with `recruiter groups set --most-waiting N {group}`")));
        }
        check_most_waiting(most)?;
        if self.0.if_set_up(self.0.put_most_waiting(name, most)).await? {
            Ok(())
        } else {
            Err(refused(format!("{name} has no limit: give it a capacity or a rate first")))
        }
    }
}

/// The settings of groups: [`Client::groups`].
#[derive(Clone, Debug)]
pub struct Groups(Store);

impl Groups {
    /// The settings of all groups that have any, by name, without those that are not valid.
    ///
    /// # Errors
    /// An error of MongoDB.
    pub async fn list(&self) -> Result<BTreeMap<String, GroupSettings>, StoreError> {
        Ok(self.0.settings().await?.groups)
    }

    /// Sets the weight of a group; `None` removes it. If any group has a weight, the groups with waiting jobs share the starts by their weights,
    /// and a group without one has weight 1.
    ///
    /// # Errors
    /// When the name or the weight is not valid ([`WEIGHTS`]), or an error of MongoDB.
    pub async fn set_weight(&self, group: &str, weight: Option<f64>) -> Result<(), SettingError> {
        check_group(group)?;
        if let Some(weight) = weight.filter(|weight| !WEIGHTS.contains(weight)) {
            return Err(InvalidSetting(format!("a weight must be from {} to {}, not {weight}", WEIGHTS.start(), WEIGHTS.end())).into());
        }
        Ok(self.0.put_of_group(group, "weight", weight.map(Bson::from)).await?)
    }

    /// Sets the ageing of a group; `None` removes it. A job that has waited for N times this time counts as N priorities higher, up to the
    /// highest one.
    ///
    /// # Errors
    /// When the name or the time is not valid ([`AGEING`]), or an error of MongoDB.
    pub async fn set_ageing(&self, group: &str, ageing: Option<Duration>) -> Result<(), SettingError> {
        check_group(group)?;
        if ageing.is_some_and(|ageing| !AGEING.contains(&ageing)) {
            return Err(InvalidSetting("the time of an ageing must be from 10ms to 366days".into()).into());
        }
        let ms = ageing.map(|ageing| i64::try_from(ageing.as_millis()).unwrap_or(i64::MAX));
        Ok(self.0.put_of_group(group, "ageing_ms", ms.map(Bson::from)).await?)
    }

    /// Sets the maintenance windows of a group, in place of those that it has. No job of the group starts in them; running jobs continue.
    ///
    /// # Errors
    /// When the name is not valid, there are more than [`MOST_WINDOWS`], or an error of MongoDB.
    pub async fn set_maintenance(&self, group: &str, windows: &[MaintenanceWindow]) -> Result<(), SettingError> {
        check_group(group)?;
        if windows.len() > MOST_WINDOWS {
            return Err(InvalidSetting(format!("a group has at most {MOST_WINDOWS} maintenance windows")).into());
        }
        let windows: Vec<Document> = windows.iter().map(window_to_document).collect();
        Ok(self.0.put_of_group(group, "maintenance", (!windows.is_empty()).then(|| windows.into())).await?)
    }

    /// Sets with how many waiting jobs the group accepts no further ones; `None` removes the setting. A further enqueueing call is refused
    /// ([`EnqueueError::BacklogFull`](crate::enqueue::EnqueueError::BacklogFull)). Processes that enqueue notice the change within about a
    /// second.
    ///
    /// # Errors
    /// When the name or the number is not valid, or an error of MongoDB.
    pub async fn set_most_waiting(&self, group: &str, most: Option<u64>) -> Result<(), SettingError> {
        check_group(group)?;
        check_most_waiting(most)?;
        Ok(self.0.put_most_waiting_in_group(group, most).await?)
    }
}

/// The pauses of jobs: [`Client::pauses`].
#[derive(Clone, Debug)]
pub struct Pauses(Store);

impl Pauses {
    /// The present pauses, except those of lines.
    ///
    /// # Errors
    /// An error of MongoDB.
    pub async fn list(&self) -> Result<BTreeMap<Paused, Pause>, StoreError> {
        Ok(self.0.settings().await?.pauses)
    }

    /// Pauses jobs: they are not assigned until [`resume`](Self::resume). Running jobs continue. Returns false if the same was paused before: that pause
    /// stays.
    ///
    /// # Errors
    /// When a group or class cannot have this name, or an error of MongoDB.
    pub async fn pause(&self, paused: &Paused, by: &str, reason: Option<&str>) -> Result<bool, SettingError> {
        if let Paused::Group(name) | Paused::Class(name) = paused {
            check_trimmed_name(name).map_err(|problem| InvalidSetting(format!("the name in `{paused}` {problem}")))?;
        }
        Ok(self.0.put_pause(paused, by, reason).await?)
    }

    /// Ends a pause. Returns whether there was one.
    ///
    /// # Errors
    /// An error of MongoDB.
    pub async fn resume(&self, paused: &Paused) -> Result<bool, SettingError> {
        Ok(self.0.if_set_up(self.0.delete_pause(paused)).await?)
    }
}
