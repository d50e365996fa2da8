//! Who reads a page.

use std::sync::Arc;

use super::super::access::{Caller, Role};

/// Who reads a page.
#[derive(Clone, Debug)]
pub(super) struct Visitor {
    /// `None` without a name.
    pub(super) name: Option<Arc<str>>,
    pub(super) role: Role,
    /// What a form must have, so that no page of others can send one.
    pub(super) csrf: Arc<str>,
    /// Whether it can log out.
    pub(super) has_session: bool,
}

impl Visitor {
    /// Somebody without a session.
    pub(super) fn without_session(caller: Caller, csrf: Arc<str>) -> Self {
        Self { name: caller.given_name().map(Arc::from), role: caller.role, csrf, has_session: false }
    }

    /// For the audit.
    pub(super) fn caller(&self) -> Caller {
        Caller::new(self.name.clone(), self.role)
    }

    pub(super) fn is_operator(&self) -> bool {
        self.role >= Role::Operator
    }
}
