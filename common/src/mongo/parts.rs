//! What other rooms keep with a connection, without this room knowing them.

use std::any::{Any, TypeId};

use elsa::sync::FrozenMap;

/// One value of each type.
#[derive(Default)]
pub(crate) struct Parts(FrozenMap<TypeId, Box<dyn Any + Send + Sync>>);

impl Parts {
    /// The value of this type, which is made when it is first asked for.
    pub(crate) fn get<T: Default + Send + Sync + 'static>(&self) -> &T {
        let of = TypeId::of::<T>();
        let part = self.0.get(&of).unwrap_or_else(|| self.0.insert(of, Box::new(T::default())));
        part.downcast_ref().expect("each value is kept under its own type")
    }
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").finish_non_exhaustive()
    }
}
